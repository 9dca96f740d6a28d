"""Stage 1c: turns of a conversation -> segments of text, each inside or outside the loss.

Sources (byte-exact): `magicoder` is ise-uiuc/magicoder's training prompt, `alpaca` the pair of prompts of
stanford_alpaca as AlpaCare and WizardCoder use it, `chat` the tokenizer's own chat template, `plain` is ours.
How a template is tokenised belongs to it: Magicoder tokenises prompt and response apart, Alpaca their joint text.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError

MAGICODER_PROMPT = (
    "You are an exceptionally intelligent coding assistant that consistently delivers accurate and reliable "
    "responses to user instructions.\n\n@@ Instruction\n{instruction}\n\n@@ Response\n"
)
ALPACA_PROMPT_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:"
)
ALPACA_PROMPT_NO_INPUT = (
    "Below is an instruction that describes a task. "
    "Write a response that appropriately completes the request.\n\n### Instruction:\n{instruction}\n\n### Response:"
)
# Data sets write "no input" in these ways; AlpaCare's own script reads only the first as such.
EMPTY_INPUTS = frozenset({"", "<noinput>", "NA"})
_PROBE = "\ue000probe\ue000"


@dataclass(frozen=True)
class Segment:
    """A piece of a sample's text.

    `supervised` pieces are in the loss. In `verbatim` ones the user's own text stands: "<|im_end|>" or "</s>" in them is
    text, never the control token of that name.
    """

    text: str
    supervised: bool
    verbatim: bool = False


@dataclass(frozen=True)
class Template:
    """A named way to lay out a sample.

    `joint`: the concatenated text is tokenised at once and the mask found by character offsets; otherwise each segment
    is tokenised alone and the mask follows by construction (a chat falls back to that where a token would cross the
    border of prompt and answer). `fingerprint` is the text that decides the tokens.
    """

    name: str
    joint: bool
    fingerprint: str


def get_template(name: str, tokenizer: Any) -> Template:
    """The template of that name; `chat` takes its text from the tokenizer.

    Raises:
        ValueError: if `chat` is asked for and the tokenizer brings no chat template.
    """
    if name == "magicoder":
        return Template(name, joint=False, fingerprint=MAGICODER_PROMPT)
    if name == "alpaca":
        return Template(name, joint=True, fingerprint=ALPACA_PROMPT_INPUT + "\0" + ALPACA_PROMPT_NO_INPUT)
    if name == "plain":
        return Template(name, joint=False, fingerprint="{instruction}\n[{input}\n]{response}")
    if name != "chat":
        raise ValueError(f"no template {name!r}: magicoder, alpaca, chat or plain")
    if not isinstance(tokenizer.chat_template, str):
        raise ValueError(
            f"template 'chat' needs a tokenizer with one chat template; {tokenizer.name_or_path} has "
            f"{'several' if tokenizer.chat_template else 'none'}: use magicoder, alpaca or plain"
        )
    # Some templates print today's date: one rendered prompt says what the text alone does not.
    sample = tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False)
    return Template("chat", joint=True, fingerprint=tokenizer.chat_template + "\0" + sample)


def render(template: Template, turns: tuple[tuple[str, str], ...], context: str, tokenizer: Any) -> list[Segment]:
    """Lay out one conversation.

    Args:
        template: from `get_template`.
        turns: (role, text), roles system, user, assistant and tool; every assistant turn is supervised.
        context: Alpaca's `input` column, "" when there is none.
        tokenizer: only `chat` uses it.

    Returns:
        segments whose concatenated text is the sample; BOS and EOS are the tokeniser stage's business.

    Raises:
        ValueError: for a conversation that the template cannot hold.
    """
    if template.name == "chat":
        return _render_chat(turns, context, tokenizer)
    if [role for role, _ in turns] != ["user", "assistant"]:
        roles = ", ".join(role for role, _ in turns)
        raise ValueError(f"template {template.name!r} holds one user and one assistant turn, not ({roles}): use chat")
    instruction, response = turns[0][1], turns[1][1]
    if template.name == "alpaca":
        prompt = _fill(ALPACA_PROMPT_INPUT if context else ALPACA_PROMPT_NO_INPUT, instruction, context)
    elif template.name == "magicoder":
        prompt = _fill(MAGICODER_PROMPT, f"{instruction}\nInput: {context}" if context else instruction)
    else:
        prompt = f"{instruction}\n{context}\n" if context else f"{instruction}\n"
    return [Segment(prompt, False, True), Segment(response, True, True)]


def answer_opening(name: str, tokenizer: Any) -> list[int]:
    """Token ids of what a template puts between a prompt and its answer: "### Response:", an assistant's turn's header.

    Raises:
        ValueError: for a chat template in which it cannot be told from the prompt.
    """
    texts = {"alpaca": ALPACA_PROMPT_NO_INPUT, "magicoder": MAGICODER_PROMPT, "plain": ""}
    if name in texts:
        text = texts[name].rpartition("\n\n")[2]
        return list(tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []
    messages = [{"role": "user", "content": _PROBE}]
    asked, prompted = (  # by tokens: two control tokens begin alike as text; some templates end a chat with EOS
        tokenizer(
            tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt), add_special_tokens=False
        )["input_ids"]
        for prompt in (False, True)
    )
    same = next((i for i, pair in enumerate(zip(asked, prompted, strict=False)) if pair[0] != pair[1]), len(asked))
    if _PROBE in tokenizer.decode(prompted[same:]):
        raise ValueError("this tokenizer's chat template rewrites the prompt, so the answer's opening is not known")
    return list(prompted[same:])


def _fill(pattern: str, instruction: str, context: str = "") -> str:
    """Fill the slots in one pass, so that braces or slot names inside the user's own text stay as they are."""
    slots = {"{instruction}": instruction, "{input}": context}
    return "".join(slots.get(piece, piece) for piece in re.split(r"(\{instruction\}|\{input\})", pattern))


def user_text(instruction: str, context: str) -> str:
    """An instruction and its input as one user turn, for formats that know no input column."""
    return f"{instruction}\n\n{context}" if context else instruction


def _render_chat(turns: tuple[tuple[str, str], ...], context: str, tokenizer: Any) -> list[Segment]:
    """Find each assistant turn's span by rendering the conversation's prefixes."""
    try:
        return _chat_segments(turns, context, tokenizer)
    except TemplateError as error:  # raise_exception() in a template: roles it does not know, turns out of order
        raise ValueError(f"the tokenizer's chat template refuses this conversation: {error}") from None


def _chat_segments(turns: tuple[tuple[str, str], ...], context: str, tokenizer: Any) -> list[Segment]:
    messages = [{"role": role, "content": text} for role, text in turns]
    if context:
        asked = next(m for m in messages if m["role"] == "user")
        asked["content"] = user_text(asked["content"], context)
    full = tokenizer.apply_chat_template(messages, tokenize=False)
    segments: list[Segment] = []
    done = 0
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        after = tokenizer.apply_chat_template(messages[: i + 1], tokenize=False)
        if i:
            before = tokenizer.apply_chat_template(messages[:i], tokenize=False, add_generation_prompt=True)
        else:  # a conversation that the assistant opens: templates cannot prompt an empty list
            probed = tokenizer.apply_chat_template([{**message, "content": _PROBE}], tokenize=False)
            before = probed.partition(_PROBE)[0]
        if not (after.startswith(before) and full.startswith(after.rstrip()) and len(before) >= done):
            raise ValueError(
                "this tokenizer's chat template rewrites earlier turns, so the answers' places are not known: "
                "use a template without such logic, or magicoder, alpaca or plain"
            )
        # The answer and its end marker are learnt; the white space behind the marker is never generated.
        start = after.find(message["content"], len(before))  # -1: the template trims contents
        end = max(start + len(message["content"]) if start >= 0 else 0, len(after.rstrip()))
        segments += [Segment(full[done : len(before)], False), Segment(full[len(before) : end], True)]
        done = end
    segments.append(Segment(full[done:], False))
    markers = control_tokens(tokenizer)
    if any(marker in m["content"] for m in messages for marker in markers):
        segments = _mark_verbatim(segments, _content_spans(messages, full, tokenizer))
    return [s for s in segments if s.text]


def control_tokens(tokenizer: Any) -> list[str]:
    """Texts that the tokenizer would read as control tokens."""
    return [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]


def _content_spans(messages: list[dict[str, str]], full: str, tokenizer: Any) -> list[tuple[int, int]]:
    """Where each message's own text stands in the rendered conversation, found by rendering a probe in its place.

    Raises:
        ValueError: if the template changes a text that holds control tokens, so that its place is not known.
    """
    spans = []
    for i, message in enumerate(messages):
        probed = [*messages[:i], {**message, "content": _PROBE}, *messages[i + 1 :]]
        start = tokenizer.apply_chat_template(probed, tokenize=False).find(_PROBE)
        text = next((t for t in (message["content"], message["content"].strip()) if full.startswith(t, start)), None)
        if start < 0 or text is None:
            raise ValueError(
                "the chat template rewrites a text that holds the template's own markers, so its place is not known: remove "
                "them from the text, or use magicoder, alpaca or plain"
            )
        spans.append((start, start + len(text)))
    return spans


def _mark_verbatim(segments: list[Segment], spans: list[tuple[int, int]]) -> list[Segment]:
    """Cut segments at the borders of the spans and mark what lies inside one."""
    borders = sorted({edge for span in spans for edge in span})
    out, position = [], 0
    for segment in segments:
        end = position + len(segment.text)
        edges = [position, *(b for b in borders if position < b < end), end]
        for start, stop in zip(edges, edges[1:], strict=False):
            inside = any(a <= start and stop <= b for a, b in spans) and stop > start
            out.append(Segment(segment.text[start - position : stop - position], segment.supervised, inside))
        position = end
    return out
