"""The chunked loss and its gradient against autograd through the logits."""

import copy

import pytest
import torch
import torch.nn.functional as F

import cluster_ds.loss as module
from cluster_ds.loss import LossHead, chunked_cross_entropy, supervised_positions

from .conftest import tiny_llama


@pytest.mark.parametrize("chunk", [1, 7, 1000])
@pytest.mark.parametrize("with_bias", [True, False])
def test_values_and_gradients_in_float64(monkeypatch, chunk, with_bias):
    monkeypatch.setitem(module.CHUNK_ELEMENTS, "cpu", chunk * 30)
    torch.manual_seed(0)
    hidden, head, bias = (torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((20, 8), (30, 8), (30,)))
    targets, weights = torch.randint(0, 30, (20,)), torch.rand(20, dtype=torch.float64)
    found = chunked_cross_entropy(hidden, head, bias if with_bias else None, targets)
    expected = F.cross_entropy(F.linear(hidden, head, bias if with_bias else None), targets, reduction="none")
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    inputs = (hidden, head, bias) if with_bias else (hidden, head)
    for a, b in zip(torch.autograd.grad(found @ weights, inputs), torch.autograd.grad(expected @ weights, inputs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_16_bits_accumulate_in_32(monkeypatch):
    """Many chunks: the head's gradient is summed in float32 and rounded once."""
    torch.manual_seed(1)
    hidden, head = torch.randn(4096, 16).bfloat16().requires_grad_(), torch.randn(50, 16).bfloat16().requires_grad_()
    targets = torch.randint(0, 50, (4096,))
    exact = head.detach().double().requires_grad_()
    F.cross_entropy(hidden.detach().double() @ exact.T, targets, reduction="sum").backward()
    monkeypatch.setitem(module.CHUNK_ELEMENTS, "cpu", 50 * 16)
    chunked_cross_entropy(hidden, head, None, targets).sum().backward()
    assert (head.grad.double() - exact.grad).norm() / exact.grad.norm() < 4e-3  # bfloat16's own rounding


def test_nothing_is_computed_for_a_frozen_head():
    hidden, head = torch.randn(5, 4, requires_grad=True), torch.randn(9, 4)
    chunked_cross_entropy(hidden, head, None, torch.arange(5)).sum().backward()
    assert hidden.grad is not None and head.grad is None
    assert chunked_cross_entropy(hidden[:0], head, None, torch.arange(0)).shape == (0,)


def test_autocast_computes_in_16_bits_and_gives_32_bit_gradients():
    hidden, head = torch.randn(5, 4, requires_grad=True), torch.randn(9, 4, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        loss = chunked_cross_entropy(hidden, head, None, torch.arange(5))
        logits = F.linear(hidden, head)
    assert logits.dtype == torch.bfloat16 and loss.dtype == torch.float32
    torch.testing.assert_close(loss, F.cross_entropy(logits.float(), torch.arange(5), reduction="none"))
    loss.sum().backward()
    assert head.grad.dtype == hidden.grad.dtype == torch.float32


def test_a_head_answers_one_question_and_is_a_head_again():
    model = tiny_llama()
    plain = copy.deepcopy(model)
    head = LossHead(model.get_output_embeddings())
    ids = torch.randint(3, 60, (2, 9))
    labels = ids.clone()
    labels[0, :5] = -100
    asked = supervised_positions(labels)
    with head.asked(ids.shape, *asked):
        losses = model(input_ids=ids, use_cache=False).logits
    logits = plain(input_ids=ids, use_cache=False).logits
    torch.testing.assert_close(losses, F.cross_entropy(logits[asked[0], asked[1]], asked[2], reduction="none"))
    torch.testing.assert_close(model(input_ids=ids, use_cache=False).logits, logits)
    assert set(model.state_dict()) == set(plain.state_dict())


def test_models_that_the_head_cannot_answer_for_are_refused():
    model = tiny_llama()
    head = LossHead(model.get_output_embeddings())
    ids = torch.randint(3, 60, (2, 9))
    embeddings = model.get_input_embeddings()(ids)
    with pytest.raises(ValueError, match=r"hidden states of shape \[2, 11\] of ids of shape \[2, 9\]"):
        with head.asked(ids.shape, *supervised_positions(ids)):  # as prompt tuning does
            model(inputs_embeds=torch.cat([embeddings[:, :2], embeddings], dim=1))
    with pytest.raises(ValueError, match="does not call its output embeddings"):
        with head.asked(ids.shape, *supervised_positions(ids)):
            model.model(input_ids=ids)
    assert model(input_ids=ids).logits.shape == (2, 9, 64)  # the question is forgotten
