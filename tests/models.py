"""Small model folders for tests that load one from disk."""

from pathlib import Path

from .conftest import tiny_llama


def save_tiny_model(folder: Path, tokenizer, **changes) -> Path:
    """A Llama with random weights and the given tokenizer, float32."""
    model = tiny_llama(vocab_size=len(tokenizer), **changes)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
