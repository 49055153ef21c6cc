"""Engines of the shipped formats: which can be timed here, and what a drafter gains in them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from distill.commands.advise_engine import advise
from distill.commands.making.record import EngineResult
from distill.engine_costs import build
from distill.engine_costs.acceptance import known_acceptance
from distill.engine_costs.costs import PAYS, EngineCosts, read_costs
from distill.options.commands import AcceleratorOptions, AdviseEngineOptions, MakeOptions
from distill.options.run import TimedOptions, TrainOptions
from drafters.export.formats import GGUF, NATIVE

ENGINES = {NATIVE: build.OURS, "vllm": "vllm", GGUF: build.LLAMA_CPP, "transformers": build.TRANSFORMERS}
PYTHONS = {"vllm": "vllm_python", build.LLAMA_CPP: "llama_cpp_python"}  # engine -> option of its interpreter
PASSES = (1, 2, 3, 4, 6, 8)  # tokens
PROMPTS, UNTRAINED_PROMPTS = 8, 4  # held-out prompts of a trained drafter, and of random weights
TOKENS = 64  # new tokens of each
PATIENCE = 900.0  # seconds for a server to start


@dataclass(frozen=True)
class Timing:
    """How engines are timed.

    Args:
        options: of the command.
        folder: of the results and logs.
    """

    options: MakeOptions
    folder: Path

    def engines(self) -> dict[str, str]:
        """Shipped formats whose engine is here, and that engine."""
        known = {to: ENGINES[to] for to in self.options.ship if to in ENGINES}
        return {to: engine for to, engine in known.items() if engine not in PYTHONS or self._python(engine)}

    def untimed(self) -> list[str]:
        """Why the other formats are not timed, a line each."""
        lines = []
        for to in self.options.ship:
            engine = ENGINES.get(to)
            if engine is None:
                lines.append(f"{to}: written, and not timed: nothing here runs it")
            elif engine in PYTHONS and not self._python(engine):
                lines.append(f"{to}: written, and not timed; give {PYTHONS[engine]}=/path/to/bin/python")
        return lines

    def candidate(self, name: str, run: TrainOptions, to: str) -> EngineCosts:
        """Costs of rounds with random weights; read from the folder if they were timed before.

        Args:
            name: of the drafter, for the file.
            run: options of a training run with this drafter.
            to: format.

        Raises:
            UserError: see `advise`.
        """
        lengths = _sorted(self.options.lengths)
        card = self._timed(f"{name}-{to}", run, to, lengths, UNTRAINED_PROMPTS, drafter=run.drafter)
        return read_costs(card["measured"]["costs"][0])

    def trained(self, checkpoint: Path, run: TrainOptions, to: str, costs: EngineCosts) -> EngineResult:
        """The draft length that pays most with a scored checkpoint, and what it gains when it is timed.

        Args:
            checkpoint: folder with a scorecard of a chain.
            run: options of the training run.
            to: format.
            costs: of `candidate`: the time of a round does not depend on the weights.

        Raises:
            UserError: see `advise`.
        """
        known = known_acceptance(None, str(checkpoint), run.score.temperatures[0], max(self.options.lengths))
        assert known
        length, predicted = costs.best(known.survival)
        found = EngineResult(
            engine=ENGINES[to], ceiling=costs.ceiling()[1], predicted=predicted, length=length
        )
        if predicted < PAYS:
            return replace(found, length=0)
        card = self._timed(to, run, to, (length,), PROMPTS, checkpoint=str(checkpoint))
        timed = card["measured"]["costs"][0]["lengths"][0]
        return replace(found, engine=card["measured"]["engine"], measured=timed["measured"], tau=timed["tau"])

    def _python(self, engine: str) -> str | None:
        return getattr(self.options, PYTHONS[engine])

    def _timed(
        self, name: str, run: TrainOptions, to: str, lengths: tuple[int, ...], prompts: int, **what: Any
    ) -> dict[str, Any]:
        out = self.folder / f"{name}.json"
        if not out.exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            advise(self._options(run, to, lengths, prompts, out, **what))
        return json.loads(out.read_text())

    def _options(
        self, run: TrainOptions, to: str, lengths: tuple[int, ...], prompts: int, out: Path, **what: Any
    ) -> AdviseEngineOptions:
        engine, score = ENGINES[to], run.score
        tokens = max(TOKENS, build.ROUNDS * (max(lengths) + 1))
        return AdviseEngineOptions(
            target=run.target,
            prompts=run.prompts,
            score=TimedOptions(
                enabled=True,
                prompts=prompts,
                replay_prompts=0,
                max_new_tokens=tokens,
                threads=score.threads,
            ),
            trainer=AcceleratorOptions(accelerator=run.trainer.accelerator),
            seed=run.seed,
            engine=engine,
            engine_python=self._python(engine) if engine in PYTHONS else None,
            engine_args=(),
            engine_patience=PATIENCE,
            target_gguf=run.export.target_gguf if to == GGUF else None,
            outtype=run.export.outtype if to == GGUF else None,
            temperature=score.temperatures[0],
            top_k=score.top_k,
            top_p=score.top_p,
            lengths=lengths,
            passes=PASSES,
            batch_sizes=(1,),
            traffic=None,
            logs=str(self.folder / "logs"),
            out=str(out),
            acceptance=None,  # of a checkpoint: its scorecard's
            **{"drafter": None, "checkpoint": None, **what},
        )


def _sorted(lengths: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted(set(lengths)))
