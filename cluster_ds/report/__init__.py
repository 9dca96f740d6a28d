"""Stage 14: what a run leaves for people: pages that are one file each and open from disk without a network."""
