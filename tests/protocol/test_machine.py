"""The state machine by itself: no torch, events as values, breaches as answers."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from ampguard.protocol.events import (
    REASONS,
    Backward,
    Breach,
    Clear,
    Divided,
    Event,
    Read,
    Refused,
    Rescale,
    Step,
    Unscale,
    Update,
    reason_of,
)
from ampguard.protocol.machine import PILED_STEPS, Machine
from ampguard.protocol.states import BREACHES, MOVES, Move, Stage

A, B, S = "opt_a", "opt_b", "scaler"


def fed(*events: Event) -> list[Breach]:
    return feed(Machine(), *events)


def feed(machine: Machine, *events: Event) -> list[Breach]:
    return [breach for event in events for breach in machine.feed(event)]


def iteration(scale: float = 1024.0, skipped: bool = False) -> list[Event]:
    return [
        Clear(A), Backward((A,), scale), Unscale(A, S, scale), Read(A), Step(A, S, skipped=skipped), Update(S),
    ]  # fmt: skip


def only(breaches: Sequence[Breach]) -> Breach:
    (breach,) = breaches
    return breach


def test_the_room_imports_no_torch() -> None:
    code = "import sys, ampguard.protocol.machine; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_move_from_every_stage_is_decided() -> None:
    assert set(MOVES) | set(BREACHES) >= {(stage, move) for stage in Stage for move in Move if stage is not Stage.EMPTY}
    assert not set(MOVES) & set(BREACHES)


def test_a_right_loop_breaks_nothing() -> None:
    machine = Machine()
    assert feed(machine, *iteration() * 5, *iteration(skipped=True), *iteration(512.0) * 3) == []
    assert machine.is_at_rest()
    assert machine.scaled == machine.open == 0


def test_several_optimizers_at_different_rates_break_nothing() -> None:
    critic = [Clear(B), Backward((B,), 8.0), Step(B, S, unscales_with=8.0), Update(S)]
    maker = [Clear(A), Backward((A, B), 8.0), Step(A, S, unscales_with=8.0), Update(S)]  # spills into the critic
    assert fed(*critic * 3, *maker, *critic * 3, *maker) == []


def test_accumulation_with_a_partial_last_window_breaks_nothing() -> None:
    micro = Backward((A,), 4.0)
    end = [Unscale(A, S, 4.0), Read(A), Step(A, S), Update(S), Clear(A)]
    assert fed(micro, micro, *end, micro, micro, *end, micro) == []


def test_true_gradients_added_after_unscaling_are_right() -> None:
    assert fed(Backward((A,), 4.0), Unscale(A, S, 4.0), Backward((A,)), Step(A, S), Update(S)) == []


def test_a_loss_that_was_not_scaled_is_divided_all_the_same() -> None:
    breach = only(
        fed(Backward((A,), 4.0, "first"), Backward((A,), None, "second"), Step(A, S, "step", unscales_with=4.0))
    )
    assert (breach.cause, breach.first, breach.again, breach.factor) == ("unscaled-backward", "second", "step", 0.25)


def test_a_wrong_division_does_no_harm_in_a_skipped_or_cleared_step() -> None:
    wrong = [Backward((A,), None), Unscale(A, S, 4.0)]
    assert fed(*wrong, Step(A, S, skipped=True)) == []
    assert fed(*wrong, Clear(A), *iteration()) == []


def test_direct_step_on_scaled_gradients() -> None:
    breach = only(fed(Backward((A,), 64.0, "backward"), Step(A, None, "step")))
    assert (breach.cause, breach.first, breach.again, breach.factor) == ("bypassed-scaler", "backward", "step", 64.0)
    assert fed(Backward((A,), 64.0), Step(A, None, is_untouched=False)) == []  # divided by hand, perhaps
    assert fed(Backward((A,), 64.0), Unscale(A, S, 64.0), Step(A, None, found_inf=False)) == []
    found = only(fed(Backward((A,), 64.0), Unscale(A, S, 64.0), Step(A, None, found_inf=True)))
    assert found.facts["found_inf"] is True


def test_direct_step_knows_of_an_update_behind_the_same_backward() -> None:
    both = [Backward((A, B), 64.0), Step(A, S, unscales_with=64.0)]
    assert only(fed(*both, Update(S, "update"), Step(B, None))).facts["updated_before"] == "update"
    assert only(fed(*both, Step(B, None), Update(S, "update"))).facts["updated_before"] is None
    assert only(fed(*both, Update(S, "update"), Backward((B,), 64.0), Step(B, None))).facts["updated_before"] is None


def test_direct_step_behind_one_that_the_scaler_skipped() -> None:
    machine = Machine()
    feed(machine, Backward((A,), 64.0), Step(A, S, "scaler's", skipped=True, unscales_with=64.0))
    assert feed(machine, Step(A, None, found_inf=False)) == []  # somebody has repaired the gradients
    found = only(feed(machine, Step(A, None, "own", is_untouched=False, found_inf=True)))
    assert (found.cause, found.again, found.facts["was_skipped"]) == ("bypassed-scaler", "own", True)


def test_direct_steps_behind_the_scaler_s_own() -> None:
    by_scaler = [Backward((A,), 64.0), Step(A, S, "scaler's", unscales_with=64.0), Update(S)]
    own = Step(A, None, "own")
    both = [*by_scaler, own, Clear(A)]
    machine = Machine()
    assert feed(machine, *both, *both) == []
    found = only(feed(machine, *both))
    assert (found.cause, found.first, found.again, found.facts["repeats"]) == ("bypassed-scaler", "scaler's", "own", 3)
    written = [*by_scaler, Step(A, None, is_untouched=False), Clear(A)]
    assert fed(*written * 4) == []  # with gradients of its own


def test_norms_of_scaled_gradients() -> None:
    assert only(fed(Backward((A,), 64.0), Read(A))).factor == 64.0
    assert fed(Backward((A,), 1.0), Read(A)) == []
    assert fed(Backward((A,), 64.0), Unscale(A, S, 64.0), Read(A)) == []


def test_update_after_each_optimizer_is_a_breach_only_where_it_did_harm() -> None:
    both = Backward((A, B), 8.0)
    turn_a = [Unscale(A, S, 8.0), Step(A, S, skipped=True), Update(S, "update")]
    assert fed(both, *turn_a, Unscale(B, S, 8.0), Step(B, S)) == []
    breach = only(fed(both, *turn_a, Unscale(B, S, 4.0), Step(B, S)))
    assert (breach.cause, breach.factor, breach.facts["updated_between"]) == ("missing-update", 2.0, "update")
    twice = only(fed(both, Unscale(B, S, 8.0), *turn_a, Unscale(B, S, 8.0), Step(B, S)))
    assert (twice.cause, twice.factor, twice.facts["twice"]) == ("missing-update", 0.125, True)


def test_scale_that_changes_inside_a_window() -> None:
    breach = only(fed(Backward((A,), 8.0), Backward((A,), 4.0), Step(A, S, unscales_with=4.0)))
    assert (breach.cause, breach.factor, breach.facts["scales"]) == ("accumulation-broken", 2.0, [4.0, 8.0])


def test_unscaled_before_the_window_is_complete() -> None:
    breach = only(fed(Backward((A,), 8.0), Unscale(A, S, 8.0), Backward((A,), 8.0), Step(A, S)))
    assert (breach.cause, breach.factor) == ("accumulation-broken", 8.0)


def test_forgotten_update_makes_the_scaler_step_with_scaled_gradients() -> None:
    breach = only(fed(Backward((A,), 8.0), Unscale(A, S, 8.0), Clear(A), Backward((A,), 8.0), Step(A, S)))
    assert (breach.cause, breach.factor) == ("missing-update", 8.0)


def test_gradients_that_pile_up_are_told_after_some_steps() -> None:
    step = [Backward((A,)), Step(A)]
    assert fed(*step * PILED_STEPS) == []
    assert only(fed(*step * (PILED_STEPS + 1))).cause == "missing-zero-grad"
    assert fed(*[Clear(A), *step] * 9) == []
    assert fed(*[Step(A)] * 9) == []  # LBFGS: one backward, many steps


@pytest.mark.parametrize(
    ("reason", "before", "cause"),
    [
        ("never-scaled", [Backward((A,))], "unscaled-backward"),
        ("unscaled-before", [Backward((A,), 8.0), Unscale(A, S, 8.0)], "double-unscale"),
        ("unscaled-before", [*iteration(), *iteration()[:3], Clear(A), Backward((A,), 8.0)], "missing-update"),
        ("unscaled-before", [*iteration(), *iteration()[:3], Backward((A,), 8.0)], "missing-update"),
        ("unscaled-before", [Backward((A,), 8.0), Unscale(A, S, 8.0), Backward((A,), 8.0)], "accumulation-broken"),
        ("unscaled-after-step", iteration()[:5], "double-unscale"),
        ("unscaled-after-step", [*iteration()[:5], Backward((A,), 8.0)], "missing-update"),
        ("stepped-before", [*iteration()[:5], Backward((A,), 8.0)], "missing-update"),
        ("no-checks-for-optimizer", [Backward((B,), 8.0)], "no-gradients"),
        ("no-checks-before-update", [Backward((A,), 8.0)], "missing-update"),
        ("half-gradients", [Backward((A,), 8.0)], "fp16-parameters"),
        ("closure", [Backward((A,), 8.0)], "bypassed-scaler"),
    ],
)
def test_what_pytorch_refuses_is_told_apart_by_what_came_before(reason: str, before: list[Event], cause: str) -> None:
    machine = Machine()
    feed(machine, *before)
    assert only(feed(machine, Refused("unscale_", reason, S, A, "here"))).cause == cause


def test_an_overflow_that_made_the_script_leave_the_iteration_is_no_accumulation() -> None:
    machine = Machine()
    feed(machine, Backward((A,), 8.0), Unscale(A, S, 8.0), Backward((A,), 8.0))
    assert only(feed(machine, Refused("unscale_", "unscaled-before", S, A, found_inf=True))).cause == "missing-update"


@pytest.mark.parametrize(("passes", "cause"), [(1, "accumulation-broken"), (2, "missing-update")])
def test_an_overflow_within_a_window_that_goes_on(passes: int, cause: str) -> None:
    """The loss is divided by 2: after one pass more the window is not complete, after two another one has come."""
    machine = Machine()
    feed(machine, Backward((A,), 8.0), Unscale(A, S, 8.0), *[Backward((A,), 8.0)] * passes)
    refused = Refused("unscale_", "unscaled-before", S, A, found_inf=True, window=2)
    assert only(feed(machine, refused)).cause == cause


def test_gradients_cleared_between_backward_and_step() -> None:
    machine = Machine()
    feed(machine, Backward((A,), 8.0, "backward"), Clear(A, "clear"))
    breach = only(feed(machine, Refused("step", "no-checks-for-optimizer", S, A)))
    assert (breach.first, breach.facts["why"], breach.facts["backward"]) == ("clear", "cleared", "backward")


def test_a_step_past_the_scaler_explains_the_update_that_is_refused() -> None:
    machine = Machine()
    assert [b.cause for b in feed(machine, Backward((A,), 8.0), Step(A, None))] == ["bypassed-scaler"]
    assert feed(machine, Refused("update", "no-checks-before-update", S)) == []


def test_a_scale_is_read_only_where_it_may_have_changed() -> None:
    class Device:
        def __float__(self) -> float:
            raise AssertionError("waited for the device")

    scale = Device()
    assert fed(Clear(A), Backward((A,), scale), Unscale(A, S, scale), Read(A), Step(A, S), Update(S)) == []


@pytest.mark.parametrize("reason", REASONS)
def test_reasons_are_pytorchs_words(reason: str) -> None:
    import torch.amp.grad_scaler as source

    text = Path(source.__file__).read_text(encoding="utf-8")
    said = REASONS[reason].removeprefix("Attempted {call} but ")
    assert said in text
    assert reason_of(REASONS[reason].format(call="step")) == reason


def test_other_errors_are_nobodys_business() -> None:
    assert reason_of("CUDA out of memory") is None


def test_a_forgotten_optimizer_leaves_no_count_behind() -> None:
    machine = Machine()
    feed(machine, Backward((A,), 8.0))
    assert machine.scaled == 1
    machine.forget(A)
    assert machine.scaled == machine.open == 0


def test_gradients_that_are_multiplied_again_may_be_added_to() -> None:
    micro = [Backward((A,), 4.0), Unscale(A, S, 4.0), Read(A)]
    again = Rescale(A, S, 4.0)
    assert fed(*micro, again, *micro, again, *micro, Step(A, S), Update(S)) == []
    machine = Machine()
    assert feed(machine, *micro, Rescale(A, S, 8.0), Backward((A,), 8.0), Unscale(A, S, 8.0), Step(A, S)) == []
    assert machine.scaled == machine.open == 0


def test_without_that_they_may_not() -> None:
    micro = [Backward((A,), 4.0), Unscale(A, S, 4.0)]
    assert only(fed(*micro, *micro, Step(A, S))).cause == "accumulation-broken"


def test_multiplying_again_puts_nothing_right_that_was_wrong() -> None:
    plain = [Backward((A,)), Unscale(A, S, 4.0), Rescale(A, S, 4.0)]
    breach = only(fed(*plain, Backward((A,), 4.0), Unscale(A, S, 4.0), Step(A, S)))
    assert breach.factor == pytest.approx(0.25)
    early = [
        Backward((A,), 4.0),
        Rescale(A, S, 4.0),
        Unscale(A, S, 4.0),
    ]  # nothing was divided: no division to take back
    assert fed(*early, Step(A, S)) == []


# --- divisions of the script's own ---------------------------------------------------------------------------------------


def test_a_division_by_hand_makes_gradients_true_and_the_scaler_knows_nothing_of_it() -> None:
    machine = Machine()
    assert feed(machine, Backward((A,), 8.0), Divided(A, S, 8.0, "by hand"), Read(A), Step(A)) == []
    assert machine.ledger(A).session is Stage.EMPTY


def test_a_division_by_hand_within_a_window_is_told_at_the_step() -> None:
    part = [Backward((A,), 8.0), Divided(A, S, 8.0, "by hand")]
    breach = only(fed(*part, *part, Step(A, None, "step")))
    assert (breach.cause, breach.first, breach.factor) == ("accumulation-broken", "by hand", 1 / 8)


def test_the_scaler_divides_what_the_script_has_divided_before_another_backward_pass() -> None:
    breach = only(
        fed(
            Backward((A,), 8.0),
            Divided(A, S, 8.0, "by hand"),
            Backward((B,), 8.0),
            Step(A, S, "step", unscales_with=8.0),
        )
    )
    assert (breach.cause, breach.factor, breach.facts["by_hand"]) == ("double-unscale", 1 / 8, True)
    assert breach.facts["divided_at"] == "by hand"


def test_steps_on_what_an_earlier_one_has_left() -> None:
    step = Step(A, S, "step", unscales_with=8.0)
    begin = [Backward((A,), 8.0, "backward"), step, Update(S)]
    assert fed(*begin, *[step, Update(S)] * (PILED_STEPS - 1)) == []
    breach = only(fed(*begin, *[step, Update(S)] * (PILED_STEPS + 2)))
    assert (breach.cause, breach.facts["is_reused"]) == ("missing-zero-grad", True)
    assert fed(*begin, *[step, Update(S), Backward((A,), 8.0), Clear(A)] * PILED_STEPS) == []
