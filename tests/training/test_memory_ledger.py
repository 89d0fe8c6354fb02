"""The ledger of storages, on a handful of tensors and on events written by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from edgeformer.training.memory import KINDS, Event, Kind, MemoryLedger, with_gradients, worst_moment


def of(ledger: MemoryLedger) -> list[tuple[int, Kind]]:
    return [(event.size_bytes, event.kind) for event in ledger.events]


def test_a_storage_is_recorded_once_under_what_made_it_and_again_when_it_goes() -> None:
    ledger = MemoryLedger([])
    with ledger.making("temporary"):
        first = torch.zeros(8)
        view = first.view(2, 4)[1]
        empty = torch.zeros(0)
        with ledger.making("optimizer"):
            second = torch.zeros(4, dtype=torch.float64)
        third = torch.zeros(1)
    assert of(ledger) == [(32, "temporary"), (32, "optimizer"), (4, "temporary")]
    assert [event.storage for event in ledger.events] == [0, 1, 2]
    outside = torch.zeros(16)
    assert len(ledger.events) == 3
    del first
    assert len(ledger.events) == 3, "a view holds it"
    del view, second
    assert ledger.events[3:] == [Event(0, -32, "temporary"), Event(1, -32, "optimizer")]
    del third, empty, outside


def test_an_address_may_be_used_again() -> None:
    ledger = MemoryLedger([])
    for _ in range(3):
        with ledger.making("activations"):
            torch.zeros(8)
    assert [event.storage for event in ledger.events] == [0, 0, 1, 1, 2, 2]


def test_all_that_an_operator_gives_is_recorded() -> None:
    values = torch.arange(6.0).view(2, 3)
    ledger = MemoryLedger([])
    with ledger.making("activations"):
        largest, places = torch.max(values, dim=1)
    assert of(ledger) == [(8, "activations"), (16, "activations")]
    del largest, places


def test_an_error_ends_what_was_being_made() -> None:
    ledger = MemoryLedger([])
    with ledger.making("temporary"):
        with pytest.raises(RuntimeError, match="no"), ledger.making("optimizer"):
            raise RuntimeError("no")
        kept = torch.zeros(2)
    assert of(ledger) == [(8, "temporary")]
    del kept


def test_weights_are_no_news_but_their_copies_in_half_precision_are_temporary() -> None:
    weight = nn.Parameter(torch.ones(4))
    other = torch.ones(4)
    ledger = MemoryLedger([weight])
    with ledger.making("activations"), torch.no_grad():
        same = weight.detach()
        half = weight.to(torch.float16)
        own = other.to(torch.float16)
        product = weight * 2
    ledger.enter(weight, "weights")
    assert of(ledger) == [(8, "temporary"), (8, "activations"), (16, "activations")]
    del same, half, own, product


def test_a_gradient_is_one_from_the_moment_it_is_there() -> None:
    parameter = nn.Parameter(torch.ones(4))
    ledger = MemoryLedger([parameter])
    with ledger.making("temporary"):
        parameter.grad = torch.zeros(4)
    ledger.is_gradient_of(parameter)
    assert ledger.events == [Event(0, 16, "temporary"), Event(0, 0, "gradients")]
    parameter.grad = torch.zeros(4)  # made outside: nobody counted it
    ledger.is_gradient_of(parameter)
    assert len(ledger.events) == 3 and ledger.events[2].size_bytes == -16
    parameter.grad = None  # a loss that leaves it out: torch calls the hook all the same
    ledger.is_gradient_of(parameter)
    assert len(ledger.events) == 3


def moment(**kinds: int) -> dict[str, int]:
    return {**dict.fromkeys(KINDS, 0), **kinds}


def test_the_worst_moment_is_the_largest_sum_and_the_first_of_them() -> None:
    events = [
        Event(0, 50, "activations"),
        Event(1, 30, "temporary"),  # 180
        Event(0, -50, "activations"),
        Event(2, 50, "optimizer"),  # 180 again
        Event(1, -30, "temporary"),
    ]
    existing: dict[Kind, int] = {"weights": 100}
    assert worst_moment(existing, events) == moment(weights=100, activations=50, temporary=30)
    assert worst_moment(existing, []) == moment(weights=100)
    assert worst_moment({}, [Event(0, 5, "weights")]) == moment(weights=5)
    more = [*events, Event(3, 31, "temporary")]
    assert worst_moment(existing, more) == moment(weights=100, temporary=31, optimizer=50)


def test_what_becomes_a_gradient_at_the_worst_moment_is_told_as_one() -> None:
    made = [Event(0, 50, "temporary"), Event(0, 0, "gradients")]
    assert worst_moment({}, made) == moment(gradients=50)
    later = [
        Event(0, 50, "temporary"),
        Event(1, 9, "activations"),
        Event(1, -9, "activations"),
        Event(0, 0, "gradients"),
    ]
    assert worst_moment({}, later) == moment(temporary=50, activations=9), "it was none then"
    gone = [*made, Event(0, -50, "temporary"), Event(1, 51, "activations")]
    assert worst_moment({}, gone) == moment(activations=51), "it goes as what it became"
    assert worst_moment({"gradients": 7}, gone) == moment(gradients=7, activations=51)


def test_a_later_micro_batch_adds_to_the_gradients_and_lets_its_own_go() -> None:
    events = [
        Event(0, 50, "temporary"),
        Event(1, 20, "temporary"),
        Event(0, 0, "gradients"),
        Event(1, 0, "gradients"),
        Event(2, 5, "activations"),
        Event(0, 0, "gradients"),  # told twice: a weight used twice
        Event(2, -5, "activations"),
        Event(0, -50, "gradients"),
    ]
    held, later = with_gradients(events)
    assert held == 70
    assert later == [
        Event(0, 50, "temporary"),
        Event(1, 20, "temporary"),
        Event(0, -50, "temporary"),
        Event(1, -20, "temporary"),
        Event(2, 5, "activations"),
        Event(2, -5, "activations"),
    ]
    assert with_gradients([]) == (0, [])


def test_every_byte_counts() -> None:
    events = [Event(0, 1, "activations"), Event(1, 1, "activations"), Event(0, 0, "gradients")]
    assert worst_moment({}, events) == moment(activations=1, gradients=1)
    assert with_gradients(events)[0] == 1


def test_what_is_made_without_a_name_are_activations() -> None:
    with MemoryLedger([]) as ledger:
        made = torch.zeros(2)
    assert of(ledger) == [(8, "activations")]
    del made
