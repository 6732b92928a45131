"""One guarded run: the recorder and its probes, the casebook, the report."""

from __future__ import annotations

import contextlib
import os
import platform
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from torch.optim import Optimizer

from ampguard.capture.barrier import FaultBarrier
from ampguard.capture.frames import left_by
from ampguard.capture.probes import Probes
from ampguard.capture.protocol.probes import CallProbes
from ampguard.capture.raised import is_about_numbers
from ampguard.capture.record import BadResult
from ampguard.capture.recorder import FlightRecorder
from ampguard.capture.script_signals import handlers_may_raise
from ampguard.capture.steps import optimizers_alive
from ampguard.diagnose.budget import LEAST_SECONDS_OF_HEALING
from ampguard.diagnose.cases.casebook import Casebook
from ampguard.diagnose.cases.examiner import Examiner
from ampguard.diagnose.protocol.desk import ProtocolDesk
from ampguard.errors import RunFolderError, StopRun, is_out_of_memory, message_of
from ampguard.incident import Environment, Incident, Report, status_of
from ampguard.protocol.events import Breach
from ampguard.replay.sandbox import heard
from ampguard.report.history import EventRow
from ampguard.report.store import read_report
from ampguard.report.summary import print_summary
from ampguard.run.children import ChildProcesses, going_on, processes_made, unwatched
from ampguard.run.dynamics import LearningDynamics
from ampguard.run.folder import RunFolder, make_run_folder
from ampguard.run.overrides.asked import OnNonfinite, Overrides
from ampguard.run.overrides.guard import overrides_under
from ampguard.run.ranks import RankWatch, watch_ranks
from ampguard.run.ranks_ending import say_what_others_saw
from ampguard.run.stopping import Stopping
from ampguard.stderr import keep, say, stream
from ampguard.threads import look_for_first_thread

ISSUES = "https://github.com/ampguard/ampguard/issues"


@dataclass(frozen=True)
class RunOptions:
    """What a run was asked for. `steps`: iterations after which it ends cleanly."""

    out: Path | None = None
    steps: int | None = None
    max_incidents: int = 5
    on_nonfinite: OnNonfinite = "observe"
    script_name: str = "script"
    overrides: Overrides | None = None
    seed: int | None = None
    """What random numbers were seeded with; for processes that the script starts."""
    joins: RunFolder | None = None
    """The folder of the guarded process that started this one, and this one's place in it."""


_guarding: Session | None = None
"""The guard that is on: PyTorch is patched once."""


def guarding() -> Session | None:
    """The guard that is on in this process: that of `ampguard run`, of `watch()`, or of an `Amp` that heals."""
    return _guarding


class Session:
    """Guards everything between `start()` and `finish()`."""

    def __init__(self, options: RunOptions) -> None:
        self._options = options
        self._folder: RunFolder | None = None
        self._barrier = FaultBarrier(self._on_fault)
        self._recorder = FlightRecorder(self, self._barrier)
        self._probes = Probes(self._recorder)
        self._rank = int(os.environ.get("RANK", "0")) if os.environ.get("RANK", "0").isdigit() else 0
        if options.joins is not None:
            self._rank = options.joins.launch.rank
        self._casebook = Casebook(self._recorder, self._on_new_incident)
        self._examiner = Examiner(
            self._recorder, self._casebook, options.max_incidents, self._rank, self._on_small_fault
        )
        self._dynamics = LearningDynamics(self._recorder, self._casebook, self._rank, self._on_dynamics_fault)
        self._protocol = ProtocolDesk(self._casebook, self._rank, self._note, self._on_taken_back, self._is_own_doing)
        self._calls = CallProbes(self._recorder, self._protocol)
        self._protocol.attach(self._calls.models)
        self._stopping = Stopping(self._recorder)
        self._release_stderr: Callable[[], None] = lambda: None
        self._overrides = overrides_under(
            options.overrides,
            options.on_nonfinite,
            self._recorder,
            self._dynamics,
            self._casebook,
            self._examiner,
            self._stopping,
        )
        self._dynamics.by_script.somebody_else_does = options.on_nonfinite != "observe"
        self._casebook.past_scaler.may_wait = options.on_nonfinite == "observe"
        self._recorder.gradients.on_device.waits_always = options.on_nonfinite != "observe"
        self._ranks: RankWatch | None = None
        self._children: ChildProcesses | None = None
        self._finished = False
        self._told_fault = False
        self._off_since: int | None = None
        """The step in which a fault of our own has ended the watching before the run did."""
        self._within: Session | None = None
        """The guard that was on already, where there was one."""
        self.report: Report | None = None

    def start(self) -> None:
        """Make the run folder and install the probes. Raises UsageError or RunFolderError before anything is patched."""
        global _guarding
        if _guarding is not None:
            say("a guard is on already; this one stays out of its way")
            self._within = _guarding
            return
        self._folder = self._options.joins or make_run_folder(self._options.out, self._options.script_name)
        _guarding = self
        self._release_stderr = keep()
        launch = self._folder.launch
        rank = self._rank if launch.shares else None
        self._dynamics.start(self._folder.path, say, rank)
        if rank is not None:
            self._ranks = watch_ranks(
                *(self._recorder, self._dynamics, self._casebook, self._folder.path, rank),
                *(self._on_ranks_fault, launch.restart),
            )
        else:
            self._children = ChildProcesses(self._folder.path, self._options, self._options.seed)
            self._children.install()
        self._recorder.steps.made_before(optimizers_alive())
        self._probes.install()
        self._calls.install()
        if self._overrides is not None:
            self._overrides.install()  # over the probes: what is recorded is what really runs

    def heal_from_now_on(self, optimizers: Sequence[Optimizer]) -> None:
        """Apply verified fixes to the running models. Whoever asks for this holds off bad steps, if nobody does yet.

        `optimizers`: those that will step, perhaps from before the guard.
        """
        self._dynamics.by_script.somebody_else_does = True
        for optimizer in optimizers:
            self._recorder.steps.created(optimizer)
        if self._overrides is not None:
            self._overrides.begin_healing()
            self._examiner.least_seconds = LEAST_SECONDS_OF_HEALING
            return
        self._overrides = overrides_under(
            None,
            "heal",
            self._recorder,
            self._dynamics,
            self._casebook,
            self._examiner,
            self._stopping,
            holds_off=False,
        )
        if self._overrides is not None and _guarding is self:
            self._overrides.install()

    def finish(self, error: BaseException | None = None) -> int:
        """Judge what is left, take the probes out, write the report. Only the first call counts.

        Returns the exit status that the guard asks for, whatever the script has made of its end: it has stopped the run,
        or was to stop it and finds the error only now, where the script has ended well. 0: the script's own.
        """
        global _guarding
        if self._finished:
            return 0
        self._finished = True
        if self._within is not None:
            self.report = self._within.report or self._within._make_report()
            return 0
        _guarding = None
        status = self._stopping.status
        with heard():
            self._end(error)
        self._release_stderr()
        return status or (self._stopping.status if error is None else 0)

    def _end(self, error: BaseException | None) -> None:
        try:
            if not isinstance(error, StopRun) and not self._stopping.has_raised:
                self._judge_the_rest(error)
        except StopRun:
            pass  # it is ending already
        except Exception as fault:
            self._tell(fault, "the end of the run was not looked at")
        finally:
            self._take_out(has_failed=error is not None and not isinstance(error, StopRun))
            self._dynamics.finish()
        try:
            self._conclude(error)
        except Exception as fault:
            self._tell(fault, "the report could not be finished")

    def _judge_the_rest(self, error: BaseException | None) -> None:
        self._recorder.judge.gradients.is_ended_by_numbers = is_about_numbers(error)
        self._calls.forward_begins(is_end=error is None)
        self._calls.run_ends()
        with left_by(error):
            self._barrier.call(self._recorder.flush, error)
            self._barrier.call(self._examiner.close)
        if self._ranks is not None:
            self._ranks.close()
        self._barrier.call(self._protocol.close)

    def abandon(self) -> None:
        """In a forked child: nothing is watched any more and nothing is written. The run is the parent's."""
        global _guarding
        self._finished, _guarding = True, None
        self._take_out()
        self._dynamics.undo()
        self._release_stderr()

    def _take_out(self, has_failed: bool = False) -> None:
        if self._overrides is not None:
            self._overrides.undo(has_failed)
        self._calls.undo()
        self._probes.undo()
        if self._ranks is not None:
            self._ranks.undo()
        if self._children is not None:
            self._children.undo()
        self._stopping.undo()

    def _conclude(self, error: BaseException | None) -> None:
        """Write the report and say where it is."""
        self.report = self._make_report()
        problem, shown = self._write(self.report)
        path = self._folder.report_path if self._folder is not None and problem is None else None
        if problem is not None:
            say(problem)
        is_told = (
            self._ranks is None or self._rank == 0 or self.report.incidents
        )  # of many ranks not all say "no incident"
        if is_told and self._options.joins is None:  # a child's part of it stands in its parent's summary
            print_summary(shown, path)
        if self._ranks is not None and self._folder is not None:
            say_what_others_saw(self._folder.path, self._rank, error)
        made = processes_made()
        if (
            made
            and shown is self.report
            and self._options.joins is None
            and self._recorder.log.next_index == 0
            and not self._recorder.steps.count
        ):
            running = self._children.still_running() if self._children is not None else 0
            say(f"{going_on(running) if running else unwatched(made)}")

    def _write(self, report: Report) -> tuple[str | None, Report]:
        """Write the report. What went wrong, and what is to be shown: the report of the children too."""
        if self._folder is None:
            return None, report
        if self._children is None or not self._folder.has_children():
            return self._folder.write(report), report
        problem = self._folder.write_beside_children(report)
        with contextlib.suppress(RunFolderError):
            return problem, read_report(self._folder.path)
        return problem, report

    def _write_so_far(self, folder: RunFolder, report: Report) -> str | None:
        """Write the report of a run that goes on. Returns None or what went wrong."""
        is_alone = self._children is None or not folder.has_children()
        return folder.write(report, is_last=False) if is_alone else folder.write_beside_children(report, is_last=False)

    def leave(self) -> None:
        """Write the report and the history from what is known. To be called where the main thread is blocked for good."""
        if self._within is not None or self._folder is None or self.report is not None:
            return
        report = self._make_report()
        problem = self._write_so_far(self._folder, report)
        if self._dynamics.history is not None:
            self._dynamics.history.close()
        if report.incidents:
            with heard():
                print_summary(report, self._folder.report_path if problem is None else None)

    def report_now(self) -> Path | None:
        """Judge what is there and write the report so far; the guard goes on. Where it is; None where it cannot be written."""
        self._barrier.call(self._recorder.flush, None)
        if self._folder is None or self._write(self._make_report())[0] is not None:
            return None
        return self.report_path

    def explain_now(self, error: BaseException) -> Incident | None:
        """The latest error there is an explanation for; where there is none, what `error` ends is judged first."""
        for attempt in range(2):
            if attempt:  # nobody has read a number of this step from the device yet
                self._barrier.call(self._recorder.flush, error)
            errors = [incident for incident in self._casebook.incidents() if incident.severity == "error"]
            if errors:
                return max(errors, key=lambda incident: incident.step)
        return None

    @property
    def report_path(self) -> Path | None:
        """The report, once it is there."""
        path = self._folder.report_path if self._folder is not None else None
        return path if path is not None and path.exists() else None

    @property
    def path(self) -> Path | None:
        """The run folder."""
        return self._folder.path if self._folder is not None else None

    def _make_report(self) -> Report:
        incidents = self._casebook.incidents()
        device = torch.cuda.get_device_name() if torch.cuda.is_initialized() else "cpu"
        world = os.environ.get("WORLD_SIZE", "1")
        size = int(world) if world.isdigit() else 1
        if self._options.joins is not None:
            size = self._options.joins.launch.world_size
        environment = Environment(torch.__version__.split("+")[0], platform.python_version(), device, size)
        is_partly_unseen = self._casebook.has_unseen or self._off_since is not None
        status = "incidents" if is_partly_unseen else status_of(incidents)
        report = Report(status, environment, self._recorder.steps.count, incidents)
        if self._overrides is not None:
            report = msgspec.structs.replace(report, run=self._overrides.as_dict())
        if self._off_since is not None:
            report = msgspec.structs.replace(report, off_since_step=self._off_since)
        return report

    # --- what the recorder tells --------------------------------------------------------------------------------------

    def on_bad(self, bad: BadResult) -> None:
        if self._overrides is not None and self._overrides.was_before_healing(bad):
            return
        if self._recorder.counting:  # nothing is run again
            self._examiner.examine(bad)
            return
        started = time.perf_counter()
        apart = self._overrides.memory.apart() if self._overrides is not None else contextlib.nullcontext()
        with apart, handlers_may_raise():
            self._examiner.examine(bad)
        self._dynamics.pause(time.perf_counter() - started)

    def on_step(self, step: int) -> None:
        self._dynamics.iteration_ended(step - 1)
        if self._ranks is not None:
            self._ranks.iteration_ended(step - 1)
        self._examiner.tick(step)
        if self._options.steps is not None and step >= self._options.steps:
            self._stopping.at_next_forward(f"{step} steps, as asked for", 0)

    def on_forward(self) -> None:
        look_for_first_thread()
        self._stopping.refuse()
        self._dynamics.root_entering()
        self._calls.forward_begins()

    def _on_new_incident(self, incident: Incident) -> None:
        from ampguard.report.terminal import print_incident  # with rich, which most runs need not load

        print_incident(incident)
        if self._folder is not None and incident.severity == "error":
            self._write_so_far(self._folder, self._make_report())  # the process may be killed before it ends
        if self._overrides is not None:
            self._overrides.heal(incident)
        if self._options.on_nonfinite == "stop" and incident.severity == "error":
            self._stopping.now(f"{incident.cause} in step {incident.step}", 3)

    def _is_own_doing(self, breach: Breach) -> bool:
        return self._overrides is not None and self._overrides.is_own_doing(breach)

    def _on_taken_back(self, incident: Incident) -> None:
        """What was told has turned out to be nothing: whoever reads along is to know."""
        say(f"{incident.cause}, told of step {incident.step}, is taken back")

    def _note(self, incident: Incident) -> None:
        self._dynamics.note(EventRow(incident.step, incident.cause, incident.explanation))

    def _on_ranks_fault(self, fault: Exception) -> None:
        self._tell(fault, "ranks are no longer compared, the guard goes on otherwise")

    def _on_small_fault(self, fault: Exception) -> None:
        """One investigation went wrong: say it once, keep watching."""
        if not self._told_fault:
            self._told_fault = True
            self._tell(fault, "this failure stays unexplained, the guard goes on watching")

    def _on_dynamics_fault(self, fault: Exception) -> None:
        self._tell(fault, "the run is no longer watched over many steps, the guard goes on otherwise")

    def _on_fault(self, fault: Exception) -> None:
        """Something in ampguard itself went wrong: say it once, step aside."""
        if not self._finished:
            self._off_since = self._recorder.steps.count
        self._recorder.active = False
        self._recorder.paused = False
        with contextlib.suppress(Exception):
            self._recorder.tape.abandon()  # nobody comes by any more to take it off
        self._tell(fault, "the guard is off from here on, your training goes on")

    def _tell(self, fault: Exception, what_now: str) -> None:
        last = traceback.extract_tb(fault.__traceback__)[-1]
        told = f"({type(fault).__name__}: {message_of(fault)}, {Path(last.filename).name}:{last.lineno}); {what_now}."
        if is_out_of_memory(fault):
            say(f"no memory is left for what it does beside the script {told}")
        else:
            say(f"a fault of its own {told} Please report it: {ISSUES}")
        if os.environ.get("AMPGUARD_DEBUG"):
            traceback.print_exception(fault, file=stream())
