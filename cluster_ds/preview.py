"""Stage 2b: samples as the model will see them, the supervised tokens told apart, for a person to look at."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import numpy as np
from rich.console import Console
from rich.text import Text

from .tokens import IGNORE_INDEX, TokenTable


def print_preview(tokens: TokenTable, tokenizer: Any, number: int, console: Console | None = None) -> None:
    """Print samples spread over the table; supervised runs are green on a terminal and stand between «» everywhere."""
    console = console or Console(highlight=False, soft_wrap=True)
    for index in np.unique(np.linspace(0, len(tokens) - 1, min(number, len(tokens))).astype(int)):
        sample = tokens[int(index)]
        console.print(Text.assemble(
            (f"--- {sample['id']}: {tokens.num_tokens[index]} tokens, {tokens.num_supervised[index]} supervised", "bold")
        ))
        console.print(preview_text(sample, tokenizer))


def preview_text(sample: dict[str, Any], tokenizer: Any) -> Text:
    """One sample's decoded tokens, control tokens included."""
    text = Text()
    pairs = zip(sample["input_ids"].tolist(), (sample["labels"] != IGNORE_INDEX).tolist(), strict=True)
    for supervised, run in groupby(pairs, key=lambda pair: pair[1]):
        decoded = tokenizer.decode([token for token, _ in run], clean_up_tokenization_spaces=False)
        text.append(f"«{decoded}»" if supervised else decoded, style="bold green" if supervised else "dim")
    return text
