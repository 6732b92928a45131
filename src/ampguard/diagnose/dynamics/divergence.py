"""divergence: weights or activations grew step after step until they overflowed.

What happens   every update overshoots: the loss climbs, the gradients grow with it, the next update overshoots more.
               What is reported as an overflow is only where it ended; the step at which the growth began is named.
Why it hurts   no precision cures it: bfloat16 and float32 only take longer to overflow.
Instead        a smaller learning rate or a warm-up; torch.nn.utils.clip_grad_norm_ before the optimizer's step (after
               scaler.unscale_); look at what was changed or which batches came where the growth began.
Not this       values that outgrow float16 while the loss is healthy: see fp16-overflow. A single bad batch. A learning-rate
               range test, which raises the rate until the loss is of no use: told as info, unless training goes on with
               those weights.
"""

from __future__ import annotations

from ampguard.capture.sampling.weights import WeightSample, watchable
from ampguard.diagnose.dynamics.climb import RISEN, RISEN_STEEPLY, fall_from, rise_of, unsteady_rise_of
from ampguard.diagnose.dynamics.diverged import told
from ampguard.diagnose.dynamics.finding import Situation, cause
from ampguard.diagnose.dynamics.growth import (
    GREW_SUDDENLY,
    growth_behind_a_calm_loss,
    growth_by_optimizer,
    growth_by_own_updates,
    growth_of_far_moves,
    growth_of_weights,
    has_outgrown,
)
from ampguard.diagnose.dynamics.proportion import (
    MOVED_FAR,
    before_its_update,
    is_near_zero,
    last_before_it_moved,
    ordinary_norm,
    usual_ratio,
)
from ampguard.diagnose.dynamics.range_test import as_a_test
from ampguard.diagnose.dynamics.remedies import LEFT_RANGE, Remedies, try_remedies
from ampguard.diagnose.dynamics.thrown import thrown_away, with_smaller_updates
from ampguard.diagnose.dynamics.trajectory import is_number
from ampguard.incident import Incident

ENDS = frozenset(
    [
        "fp16-overflow",
        "overflow",
        "indeterminate",
        "nonfinite-parameter",
        "gradient-overflow",
        "singular-gradient",
        "unexplained",
    ]
)
"""How a divergence ends."""
SELDOM = frozenset(["domain-error"])
"""How it ends where weights leave a function's domain. Most of these are no end of one: a gentle rise is not enough."""

WEIGHTS_GREW = 1.1
WEIGHTS_GREW_UNSTEADILY = 2.0
"""The same, where the loss alone leaves room for doubt."""
OUT_OF_SIGHT = 1e15
"""Times their norm: weights that have moved so far may have a norm whose square float32 cannot hold."""
MORE_RANGE = frozenset(["force-fp32", "use-bf16", "disable-amp"])


@cause("divergence", asked=("failure",))
def divergence(situation: Situation) -> Incident | None:
    incident = situation.failure
    if incident is None or incident.cause not in ENDS | SELDOM or situation.rests_on_others:
        return None
    answer = _end_of(incident, situation)
    told = as_a_test(answer or incident, situation)
    return answer if told is incident else told


def _end_of(incident: Incident, situation: Situation) -> Incident | None:
    if incident.mode != "train":
        return in_evaluation(incident, situation)
    rise = rise_of(situation.trajectory)
    if rise is None:
        answer = sudden(incident, situation)
        is_tried = answer is not None and any(fix.verified is not None for fix in answer.fixes)
        if is_tried:
            return answer
        answer = unseen_by_the_loss(incident, situation) or unsteady(incident, situation) or answer
        return answer or thrown_away(incident, situation) or with_smaller_updates(incident, situation)
    if incident.cause in SELDOM and rise.factor < RISEN_STEEPLY:
        return None
    grown = growth_of_weights(situation, rise.began)
    if grown is not None and grown < WEIGHTS_GREW:
        return None  # the data got larger, not the model
    if grown is None and (rise.factor < RISEN_STEEPLY or were_mostly_skipped(situation, rise.began)):
        return None
    remedies = remedies_of(situation, even_if_data=True)
    if remedies is not None and is_batch_alone(remedies):
        return None
    return told(incident, situation, rise, grown, remedies)


def were_mostly_skipped(situation: Situation, began: int) -> bool:
    """Whether a scaler skipped most of the steps of a rise: weights that nobody has changed have not diverged."""
    skipped = [vitals.skipped for vitals in situation.trajectory.recent if vitals.step >= began]
    return bool(skipped) and sum(map(bool, skipped)) > len(skipped) / 2


def is_batch_alone(remedies: Remedies) -> bool:
    """Whether weights from before the rise fail on this batch as well, and these are hardly others, or bear other batches."""
    if not remedies.fails_before:
        return False
    return remedies.bears_others or (remedies.moved is not None and remedies.moved < MOVED_FAR)


def in_evaluation(incident: Incident, situation: Situation) -> Incident | None:
    """A divergence that shows first where the model is evaluated: only weights that have grown out of all proportion tell."""
    rise = rise_of(situation.trajectory)
    grown = growth_of_weights(situation, rise.began) if rise is not None else None
    if rise is not None and grown is not None and grown >= GREW_SUDDENLY and rise.factor >= RISEN_STEEPLY:
        return told(incident, situation, rise, grown, None)
    return sudden(incident, situation)


def sudden(incident: Incident, situation: Situation) -> Incident | None:
    """A divergence of one or two updates: no climb can be seen, the weights tell.

    Either the failing batch is healthy on the weights of a few steps ago, and those have moved far; or, where these steps
    were not kept, the weights have grown many times over since they were last looked at (before the first look: beyond
    the size that weights of their shapes ordinarily have), and the optimizer's updates can have done it.
    """
    losses = situation.trajectory.loss_series()
    looks = last_before_it_moved(situation.trajectory.looks)
    if not losses and looks:
        losses = situation.running  # the first iteration: something has stepped in it already
    if not losses:
        return None
    remedies = remedies_of(situation, even_if_data=False) if incident.mode == "train" else None
    if remedies is not None and remedies.began_at is not None and not remedies.is_of_first_steps:
        is_raised = is_of_raised_rate(remedies, incident)
        if not is_raised and not is_giant(remedies, situation):
            return None
        had_grown = any(has_outgrown(remedies.norm_before, look, remedies.noticed_at) for look in looks)
        had_grown |= any(
            look.step == remedies.noticed_at - 1 and before_its_update(look) is not None
            for look in situation.trajectory.looks
        )
        began = remedies.noticed_at - had_grown if had_grown or is_raised else remedies.began_at
        return told(incident, situation, fall_from(losses, began), None, remedies)
    is_of_weights = incident.evidence.get("kind") == "nan" and not (remedies is not None and remedies.fails_before)
    if incident.cause in SELDOM and not is_of_weights:
        return None  # an operand on the domain's edge (a 0 under a logarithm), or outside it whatever the weights are
    since: list[WeightSample | None] = [*looks] or [None]
    found = [growth for look in since if (growth := growth_since(look, losses, incident, situation))]
    found = found or since_the_first(losses, incident, situation) or out_of_sight(losses, incident, remedies)
    if not found:
        return None
    grown, usual = max(found)
    within = [step for step, loss in losses if abs(loss) <= 2 * usual]
    return told(incident, situation, fall_from(losses, within[-1]), grown, remedies, since_look=bool(looks))


def unseen_by_the_loss(incident: Incident, situation: Situation) -> Incident | None:
    """Weights that grew look after look until they overflowed, behind a loss that does not see their size."""
    losses = situation.trajectory.loss_series()
    growth = growth_behind_a_calm_loss(situation)
    if growth is None or not losses or incident.cause in SELDOM:
        return None
    usual = max(abs(loss) for _, loss in losses)
    if not is_out_of_range(incident, usual, losses[-1][1]):
        return None
    grown, began = growth
    return told(incident, situation, fall_from(losses, began), grown, None)


def unsteady(incident: Incident, situation: Situation) -> Incident | None:
    """A divergence whose loss goes up and down: it is far above where it was before it first climbed, the weights have grown
    with it by updates of their optimizer, and these were far too large: one was seen, or smaller ones cure the failure."""
    rise = unsteady_rise_of(situation.trajectory)
    if rise is None or incident.cause in SELDOM or were_mostly_skipped(situation, rise.began):
        return None
    if not is_out_of_range(incident, rise.best, rise.last):
        return None
    growth = growth_by_own_updates(situation, rise.began, rise.factor)
    if growth is None or growth[0] < WEIGHTS_GREW_UNSTEADILY:
        return None
    grown, is_far_moved = growth
    remedies = remedies_of(situation, even_if_data=False)
    if remedies is not None and is_batch_alone(remedies):
        return None
    is_cured = remedies is not None and remedies.is_weights_doing and bool(remedies.lower_rate.verified)
    return told(incident, situation, rise, grown, remedies) if is_far_moved or is_cured else None


def growth_since(
    look: WeightSample | None, losses: list[tuple[int, float]], incident: Incident, situation: Situation
) -> tuple[float, float] | None:
    """By which factor an optimizer's weights have outgrown health since a look at them, and the largest |loss| until then."""
    if look is None:
        known = losses
    elif losses is situation.running:
        known = losses[:1]  # the others may come after the first update
    else:
        known = [point for point in losses if point[0] <= max(look.step, losses[0][0])]
    usual = max(abs(loss) for _, loss in known)
    if not is_out_of_range(incident, usual, losses[-1][1]):
        return None  # a wider type bears these weights
    rise = max(abs(loss) for _, loss in losses) / usual if usual else 1.0
    growth = growth_by_optimizer(look, situation, rise)
    return None if growth is None else (growth, usual)


def since_the_first(
    losses: list[tuple[int, float]], incident: Incident, situation: Situation
) -> list[tuple[float, float]]:
    """The same, where the loss has risen since the first one, and an update was seen that was as large as the weights."""
    usual = abs(losses[0][1])
    has_risen = abs(losses[-1][1]) >= RISEN * usual > 0
    is_out = has_risen and is_out_of_range(incident, usual, losses[-1][1])
    growth = growth_of_far_moves(situation) if is_out else None
    return [] if growth is None else [(growth, usual)]


def out_of_sight(
    losses: list[tuple[int, float]], incident: Incident, remedies: Remedies | None
) -> list[tuple[float, float]]:
    """The same, where the norm of the weights has left float32's range itself, and no look has a number for it."""
    usual = abs(losses[0][1])
    if remedies is None or not remedies.is_weights_doing or (remedies.moved or 0.0) < OUT_OF_SIGHT:
        return []
    return [(remedies.moved or 0.0, usual)] if is_out_of_range(incident, usual, losses[-1][1]) else []


def is_out_of_range(incident: Incident, usual: float, last: float) -> bool:
    """Whether the failing step fails in float32 as well, or has a loss there that is out of all proportion.

    In an evaluation: whether the `last` loss of the training is, against the `usual` ones.
    """
    if not any(fix.verified and fix.action in MORE_RANGE for fix in incident.fixes):
        return True
    if incident.mode != "train":
        return abs(last) >= RISEN * usual > 0
    wide = incident.evidence.get("loss_in_float32")
    return is_number(wide) and abs(wide) >= RISEN * usual > 0


def is_of_raised_rate(remedies: Remedies, incident: Incident) -> bool:
    """Whether the loss has climbed since the learning rate was raised, and at the old rate nothing fails."""
    if not (remedies.rate_was_raised and remedies.is_weights_doing and remedies.lower_rate.verified):
        return False
    losses = [abs(loss) for _, loss in remedies.losses]
    has_climbed = losses[-1] >= LEFT_RANGE * losses[0] and is_out_of_range(incident, losses[-1], losses[-1])
    return has_climbed or max(losses) > remedies.bound


def is_giant(remedies: Remedies, situation: Situation) -> bool:
    """Whether the updates of the stretch were out of all proportion, or the loss had left its range by far."""
    left = max((abs(loss) for _, loss in remedies.losses), default=0.0) >= RISEN * remedies.bound
    usual = usual_ratio(situation.trajectory.looks)
    moved = remedies.moved
    weights = [p for optimizer in situation.optimizers for p in watchable(optimizer)]
    if moved is not None and is_near_zero(remedies.norm_before, weights):
        moved *= remedies.norm_before / ordinary_norm(weights)
    is_out_of_proportion = moved is not None and moved >= MOVED_FAR
    if usual is not None and moved is not None:
        is_out_of_proportion &= moved >= RISEN * min(usual, MOVED_FAR) * max(1, remedies.updates)
    return left or is_out_of_proportion


def remedies_of(situation: Situation, even_if_data: bool) -> Remedies | None:
    """What lower rates and clipping come to on the steps before the failure; None where they were not kept."""
    replay, known = situation.stretch, situation.remedies
    if replay is not None and even_if_data not in known:
        known[even_if_data] = try_remedies(replay, situation.trajectory, even_if_data)
    return known.get(even_if_data)
