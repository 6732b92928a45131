"""What ranks tell each other of their fixes: each once, whole or not at all, and never its own."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from ampguard import compat
from ampguard.incident import Fix, Incident
from ampguard.run.overrides.healed_ranks import Healed, HealedRanks
from ampguard.run.overrides.healing import Healer


def healed(step: int, target: str = "stem") -> Healed:
    return Healed(step, "fp16-overflow", "force-fp32", target, None)


def test_each_fix_is_taken_once_by_every_other_rank(tmp_path: Path) -> None:
    taken: list[tuple[int, int, str | None]] = []

    def of(rank: int) -> HealedRanks:
        def take(what: Healed, by: int) -> bool:
            taken.append((rank, by, what.target))
            return what.target != "unknown"

        return HealedRanks(tmp_path, rank, take)

    first, second, third = of(0), of(1), of(2)
    assert not first.look()  # there is no folder yet
    second.share(healed(4))
    assert (first.look(), second.look()) == (True, False)
    assert not first.look()
    second.share(healed(6, "unknown"))
    assert not first.look()
    assert third.look()
    third.share(healed(7, "head"))
    assert (first.look(), second.look()) == (True, True)
    assert [row for row in taken if row[0] == 0] == [(0, 1, "stem"), (0, 1, "unknown"), (0, 2, "head")]
    assert [row for row in taken if row[0] == 1] == [(1, 2, "head")]
    assert [row for row in taken if row[0] == 2] == [(2, 1, "stem"), (2, 1, "unknown")]


def test_what_is_half_written_or_cannot_be_written_harms_nobody(tmp_path: Path) -> None:
    (tmp_path / "ranks").mkdir()
    (tmp_path / "ranks" / "healed-by-1.json").write_text('[{"step": 3,')
    assert not HealedRanks(tmp_path, 0, lambda *_: True).look()
    (tmp_path / "file").write_text("")
    HealedRanks(tmp_path / "file", 0, lambda *_: True).share(healed(1))


@pytest.mark.parametrize(("is_alone", "changed"), [(True, ["bf16"]), (False, [])])
def test_one_rank_of_several_does_not_change_its_precision(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], is_alone: bool, changed: list[str]
) -> None:
    """Its loss scale would no longer be that of the gradients that it is averaged with."""
    from ampguard.run.overrides.ledger import Ledger
    from ampguard.run.overrides.plan import Plan

    monkeypatch.setattr(compat, "several_ranks", lambda: not is_alone)
    plan, ledger = Plan(None), Ledger()
    nothing = SimpleNamespace(roots=[])
    healer = Healer(plan, nothing, None, None, ledger, lambda: None)  # type: ignore[arg-type]  # no modules, no lines
    fix = Fix("use-bf16", None, "use bfloat16", verified=True, outcome="the replayed step is finite; the loss is 1.0")
    failure = Incident(
        3, 0, "train", "forward", "error", "fp16-overflow", None, None, None, None, "It failed.", {}, (fix,)
    )
    healer.heal(failure)
    assert [entry["action"] for entry in ledger.healed] == (["use-bf16"] if changed else [])
    assert ([plan.mode.name] if plan.mode is not None else []) == changed
    assert ("Run all ranks with --precision bf16" in capsys.readouterr().err) is not is_alone
