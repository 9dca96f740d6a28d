"""What a cluster is about: the terms that tell its samples from all others."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from sklearn.feature_extraction.text import CountVectorizer

_MOST_TERMS = 20_000
_PRIOR = 0.01  # samples that the prior counts for, a sample of the corpus: rare terms need more than one sample
_LEAST_SCORE = 1.96  # standard errors


def telling_terms(texts: Sequence[str], clusters: np.ndarray, num_clusters: int, number: int = 5) -> list[list[str]]:
    """The terms of each cluster with the greatest log-odds ratio against the other clusters, in standard errors.

    Counted once a sample, so that one long sample does not name a cluster; with an informative Dirichlet prior, so that
    rare terms do not either.

    Args:
        texts: of n samples.
        clusters: int [n].
        num_clusters: K.
        number: terms of a cluster, at most.
    Returns:
        K lists; empty where nothing tells a cluster apart.
    Source: Monroe, Colaresi, Quinn 2008, "Fightin' Words", equations 15, 16 and 22.
    """
    try:
        counter = CountVectorizer(
            binary=True, max_features=_MOST_TERMS, token_pattern=r"[^\W\d]\w{2,}", stop_words="english", dtype=np.int64
        )
        found = counter.fit_transform(texts)
    except ValueError:  # no word in any of the texts
        return [[] for _ in range(num_clusters)]
    names = counter.get_feature_names_out()
    if len(names) < 2:
        return [[] for _ in range(num_clusters)]
    counts = np.stack([np.asarray(found[clusters == c].sum(axis=0)).ravel() for c in range(num_clusters)]).astype(float)
    total = counts.sum(axis=0)
    prior = _PRIOR * total
    all_prior = prior.sum()
    out = []
    for mine in counts:
        others = total - mine
        odds = np.log((mine + prior) / (mine.sum() + all_prior - mine - prior))
        against = np.log((others + prior) / (others.sum() + all_prior - others - prior))
        score = (odds - against) / np.sqrt(1 / (mine + prior) + 1 / (others + prior))
        best = np.argsort(-score, kind="stable")[:number]
        out.append([str(names[i]) for i in best if score[i] > _LEAST_SCORE])
    return out
