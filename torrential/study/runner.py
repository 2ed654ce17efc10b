"""One run of a study, as `torrential train` would do it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from torrential import records, run
from torrential.errors import Diverged
from torrential.opening import open_run
from torrential.resolve import RunRequest
from torrential.study.ask import Question
from torrential.study.plan import Trial
from torrential.study.question import Subject, request, tried
from torrential.study.results import DIVERGED
from torrential.study.watch import StudyProgress
from torrential.worlds.local.launch import Launch
from torrential.worlds.local.warm import Warm

if TYPE_CHECKING:
    from torrential.worlds.ray.agents import Agents


OF_AGENTS = ("hosts", "cpus_per_worker", "gpus_per_worker", "placement", "interface")


class Train:
    """A Runner. Processes of all runs come from one that has torch loaded."""

    def __init__(self, question: Question, subject: Subject, watching: StudyProgress) -> None:
        self._question, self._subject, self._watching = question, subject, watching
        self._warm: Warm | None = None
        self._agents: Agents | None = None
        self._asked_for: object = None  # the workers and settings that the agents are for

    def close(self) -> None:
        if self._warm is not None:
            self._warm.close()
        if self._agents is not None:
            self._agents.close()

    def __call__(self, trial: Trial) -> None:
        launch = self._launch() if trial.spec.world == "local" else None
        try:
            question = self._question
            subject = self._subject
            if subject.loop is not None:
                subject = replace(subject, loop=replace(tried(question.asked, trial.seed, launch), prints=False))
            asked = request(question.asked, trial.spec, subject, trial.seed, question.measured)
            if trial.values:  # test data is for what is reported
                asked = replace(asked, options=asked.options | {"test": "false"})
            agents = None
            if asked.world == "ray":
                agents = self._agents_for(asked)
                asked = replace(asked, options=asked.options | {"hosts": agents.hosts})
            job = open_run(asked, trial.directory)
            display = self._watching.listen(run.planned_steps(job))
            try:
                run.execute(job, agents or launch, lambda _: display)
            except Diverged:  # it would do so again, so that is its result: the target missed
                records.note_end(trial.directory, DIVERGED)
        finally:
            if launch is not None:
                launch.close()

    def _agents_for(self, asked: RunRequest) -> Agents:
        """The agents on a Ray cluster, which stay as long as runs are of as many workers, with the same settings."""
        from torrential.worlds.ray.agents import agents_for

        wanted = asked.workers, {name: asked.options.get(name) for name in OF_AGENTS}
        if self._agents is None or wanted != self._asked_for:
            if self._agents is not None:
                self._agents.close()
            self._agents, self._asked_for = agents_for(asked.options, asked.workers, kept=True), wanted
        return self._agents

    def _launch(self) -> Launch:
        if self._warm is None:
            self._warm = Warm()
        return self._warm.launch()
