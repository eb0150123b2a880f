"""Targets by what a driver tells: those that are listed, and their relatives.

sm_86 and sm_103 stand beside a listed one that differs in a capability from the next; sm_120 is newer than all, and
can less; sm_75 is older than all.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from pagedmla.hardware.targets import TARGETS, Target, target_of

CUDA = torch.device("cuda", 0)
CAPABILITIES = (
    "native_e4m3",
    "rounds_e4m3",
    "warpgroup_mma",
    "tiles_of_32",
    "second_stage",
    "hoists_float32",
)


def target_of_card(monkeypatch: pytest.MonkeyPatch, arch: int, shared: int) -> Target:
    told = SimpleNamespace(
        major=arch // 10, minor=arch % 10, shared_memory_per_block_optin=shared, shared_memory_per_block=48 * 1024
    )
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: told)
    return target_of(CUDA)


@pytest.mark.parametrize("name", [name for name in TARGETS if name.startswith("sm_")])
def test_a_listed_card_is_its_target(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    assert target_of_card(monkeypatch, int(name.removeprefix("sm_")), 1) is TARGETS[name]


@pytest.mark.parametrize(
    ("arch", "shared", "like"), [(75, 64, "sm_80"), (86, 99, "sm_80"), (87, 163, "sm_80"), (103, 227, "sm_100")]
)
def test_a_relative_can_what_its_architecture_can(
    monkeypatch: pytest.MonkeyPatch, arch: int, shared: int, like: str
) -> None:
    """sm_103 got tiles of 32 keys where sm_100 has 64, and sm_86 hoisted the loop that spills on sm_80: capabilities
    were asked for by name, and a relative's isn't listed."""
    card = target_of_card(monkeypatch, arch, shared * 1024)
    assert (card.name, card.arch, card.shared_per_block) == (f"sm_{arch}", arch, shared * 1024)
    assert {name: getattr(card, name) for name in CAPABILITIES} == {
        name: getattr(TARGETS[like], name) for name in CAPABILITIES
    }


def test_a_newer_card_need_not_do_all_that_its_relative_does(monkeypatch: pytest.MonkeyPatch) -> None:
    card = target_of_card(monkeypatch, 120, 99 * 1024)
    assert (card.warpgroup_mma, card.tiles_of_32, card.native_e4m3, card.rounds_e4m3) == (False, True, True, True)


def test_an_unlisted_amd_card(monkeypatch: pytest.MonkeyPatch) -> None:
    told = SimpleNamespace(gcnArchName="gfx90a:sramecc+:xnack-", shared_memory_per_block=64 * 1024)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: told)
    card = target_of(CUDA)
    assert (card.name, card.backend, card.warpgroup_mma) == ("gfx90a", "hip", False)
