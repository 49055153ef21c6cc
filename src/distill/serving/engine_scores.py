"""Measure a checkpoint in the engine that will serve it (score.engine)."""

from __future__ import annotations

import shlex
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from decode.errors import UserError
from decode.evaluation.scorecard import Scorecard
from decode.evaluation.served import Served
from decode.evaluation.teacher_forced import Rollout
from decode.model.load import source_of, stop_tokens
from decode.model.target import Target
from decode.plan import Plan
from decode.sampling import Sampler
from distill.engines.base import Request, SamplingParams
from distill.engines.http import Server, openai
from distill.engines.openai import OpenAIEngine
from distill.engines.vllm import VLLM
from distill.options.run import ScoringOptions
from distill.prompts.chat_template import Chat
from distill.prompts.prompt import Prompt
from distill.scoring.served import difference
from distill.serving.agreement import compare, matching_row, same_prompts
from distill.serving.broken_exports import Seen, likeliest
from distill.serving.diagnosis import CPU_DRAWS, ServerFacts, causes
from distill.serving.endpoint import Endpoint
from distill.serving.metrics import parser, served_acceptance
from distill.serving.served_texts import Excess, compare_texts, excess_of
from distill.serving.traffic import Traffic, send
from distill.utils.progress import say
from drafters.base import Drafter
from drafters.checkpoint.folder import read_config
from drafters.checkpoint.io import as_saved, load
from drafters.export import formats
from drafters.registry import short_name

NONE = "none"  # score.engine
TOLERANCE = 0.02  # tolerance of acceptance, as in verify-served
TIMEOUT, RETRIES, PATIENCE = 600.0, 1, 60.0  # seconds, attempts and seconds of one request
SAME = 0.95  # share of greedy answers with equal numbers of rounds below which mistakes are searched
SPARE = 16  # tokens of context beyond prompt, answer and draft
Answers = Mapping[Sampler, Sequence[Rollout]]


def as_served(
    options: ScoringOptions, to: str | None, drafter: Drafter, target: Target
) -> tuple[ScoringOptions, str]:
    """Add the chain that an engine drafts to the scored plans; also return that plan's name.

    Args:
        options: options of scoring.
        to: program of the export; None: no export.
        drafter: the drafter, trained or not.
        target: target of the drafter.

    Returns:
        The options with the additional plan; unchanged, and "", if nothing serves the drafter.

    Raises:
        UserError: score.engine has no format for the drafter.
    """
    to = to if options.engine == NONE else format_for(drafter, target)
    length = formats.served_length(short_name(drafter), drafter.settings, to) if to else None
    if length is None:
        return options, ""
    return replace(options, plans=(*options.plans, {"depth": length})), Plan(length).name


def format_for(drafter: Drafter, target: Target) -> str:
    """Format in which vLLM loads a drafter.

    Raises:
        UserError: there is none; see `formats.check`.
    """
    name, settings = short_name(drafter), drafter.settings
    found = formats.accepting(name, settings, target)
    to = next((to for to in ("vllm", "speculators") if to in found), "vllm")
    formats.check(name, settings, target, to)
    return to


def check(options: ScoringOptions, training: bool) -> None:
    """Check the options of score.engine before work starts.

    Args:
        options: options of scoring.
        training: several checkpoints will be scored.

    Raises:
        UserError: contradictory options, no interpreter, an interpreter without the engine, or missing
            client packages.
    """
    given = {
        "engine_python": options.engine_python,
        "engine_url": options.engine_url,
        "engine_args": options.engine_args,
    }
    if options.engine == NONE:
        for name in [name for name, value in given.items() if value]:
            raise UserError(f"score.{name}: needs an engine; add score.engine=vllm, or remove score.{name}")
        return
    for needed in (openai, parser):  # packages that are optional
        needed()
    if options.min_p or options.repetition_penalty != 1:
        raise UserError(f"score.engine={options.engine}: takes no score.min_p and score.repetition_penalty")
    if bool(options.engine_python) == bool(options.engine_url):
        raise UserError(
            f"score.engine={options.engine}: give score.engine_python=/path/to/bin/python of an environment "
            "that has it, or, where one runs with this drafter, score.engine_url=http://host:port"
        )
    if options.engine_url:
        if training:
            raise UserError(
                "score.engine_url: a running engine cannot load the checkpoints of a run; give "
                "score.engine_python, or measure one of them by foredraft score"
            )
        if options.engine_args:
            raise UserError("score.engine_args: are of an engine that is started; leave out score.engine_url")
    else:
        VLLM(str(options.engine_python))


def scorer(
    options: ScoringOptions, chat: Chat, prompts: Sequence[Prompt], seed: int, folder: Path, training: bool
) -> EngineScorer | None:
    """Build the `EngineScorer` of the options; None without score.engine."""
    if options.engine == NONE:
        return None
    return EngineScorer(options, chat, prompts, seed, folder, training)


class Answered(NamedTuple):
    """Traffic of each setting, and version of the engine."""

    engine: str
    by_setting: dict[tuple[Sampler, int], Traffic]


class EngineScorer:
    """Exports a checkpoint, starts the engine with it and sends it the held-out prompts.

    Args:
        options: options of scoring, with an engine.
        chat: renders prompts.
        prompts: held-out prompts, sent as token ids.
        seed: seed of the engine's draws.
        folder: folder of logs and temporary exports.
        training: report an engine's failure and continue the run.
    """

    def __init__(
        self,
        options: ScoringOptions,
        chat: Chat,
        prompts: Sequence[Prompt],
        seed: int,
        folder: Path,
        training: bool,
    ) -> None:
        self.options, self.seed, self.folder, self.training = options, seed, folder, training
        self.chat = Chat(chat.tokenizer, "none")  # requests contain rendered prompts
        sent = prompts[: options.replay_prompts or options.prompts]
        self.requests = [Request(p.id, 0, chat.encode(p.messages, p.tools)) for p in sent]
        self.answered: dict[str, Answered] = {}  # by step; plain decoding by target, measured once

    def __call__(self, card: Scorecard, drafter: Drafter, target: Target, answers: Answers) -> list[Served]:
        """Measure acceptance, text and rate at each temperature and batch size.

        Args:
            card: scorecard of the same checkpoint.
            drafter: drafter loaded from the checkpoint.
            target: target of the drafter; the export contains it tuned if the drafter tunes it.
            answers: the verifying target's answers to the held-out prompts.

        Raises:
            UserError: outside of training, the engine cannot be started, ends, or does not draft.
        """
        try:
            return self._measure(card, drafter, target, answers)
        except UserError as error:
            if not self.training:
                raise
            say(f"step {card.checkpoint.step} is not measured in {self.options.engine}: {error}")
            return []

    def _measure(self, card: Scorecard, drafter: Drafter, target: Target, answers: Answers) -> list[Served]:
        name = f"{card.checkpoint.drafter}-{card.checkpoint.step}"
        if self.options.engine_url:
            drafted, plain = self._answer(Endpoint(self.options.engine_url, TIMEOUT, ""), target), None
        else:
            with self._export(drafter, target, name) as (command, model):
                plain = self._run(f"vllm serve {shlex.quote(model)}", "plain", "plain decoding", target)
                drafted = self._run(command, name, f"step {card.checkpoint.step}", target)
        verifier = drafter.verifier(target)
        found = [
            self._served(card, setting, traffic, drafted.engine, plain, drafter, verifier, answers)
            for setting, traffic in drafted.by_setting.items()
        ]
        for one in found:
            if not one.agrees:
                say(difference(one))
        return found

    @contextmanager
    def _export(self, drafter: Drafter, target: Target, name: str) -> Iterator[tuple[str, str]]:
        """The command that serves a drafter, and the target's folder or hub id."""
        self.folder.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=self.folder))
        model = str(source_of(str(target.model.name_or_path))[0])  # a GGUF file's converted folder
        try:
            saved = as_saved(drafter)
            if drafter.traits.tunes_target:
                model = str(folder / "target")
                Path(model).mkdir()
                formats.write_layout(saved, target, "hf").write(Path(model))
            layout = formats.write_layout(saved, target, format_for(drafter, target))
            layout.write(folder)
            try:
                yield layout.command(model, str(folder)).replace("TUNED_TARGET", model), model
            except UserError as error:
                raise UserError(f"{error}{_fault(folder, target)}") from None
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _run(self, command: str, name: str, what: str, target: Target) -> Answered:
        """Start a server and collect its answers at every setting; cached by name."""
        options, key = self.options, name if name != "plain" else command
        if key in self.answered:
            return self.answered[key]
        say(f"score.engine={options.engine}: serving {what}")
        room = max(len(request.tokens) for request in self.requests) + options.max_new_tokens + SPARE
        arguments = [
            *("--dtype", str(target.dtype).removeprefix("torch."), "--no-enable-prefix-caching"),
            *("--max-model-len", str(min(room, target.max_positions or room))),
            *("--max-num-seqs", str(max(options.batch_sizes)), "--seed", str(self.seed)),
            *([] if name == "plain" else ["--per-request-spec-decode-metrics", "summary"]),
            *(["--enforce-eager"] if target.device.type == "cpu" else []),  # compiling takes minutes on a CPU
        ]
        engine = VLLM(str(options.engine_python), options.engine_args, options.engine_patience)
        with engine.serve(command, self.folder / f"{name}.log", *arguments) as running:
            self.answered[key] = self._answer(Endpoint(running.url, TIMEOUT, ""), target)
        return self.answered[key]

    def _answer(self, endpoint: Endpoint, target: Target) -> Answered:
        """Send the prompts at every temperature and batch size."""
        options, found = self.options, {}
        model = next((listed.id for listed in endpoint.models()), "")
        for sampler in options.samplers():
            params = SamplingParams(
                {"temperature": sampler.temperature, "top_k": sampler.top_k, "top_p": sampler.top_p},
                options.max_new_tokens,
                stop_tokens(target),
            )
            for batch in options.batch_sizes:
                limits = (batch, TIMEOUT, RETRIES, PATIENCE, "")
                server = Server(f"{endpoint.url}/v1", model, *limits, group="score.engine_", stored=False)
                client = OpenAIEngine(server, self.chat, self.seed, None)
                client(self.requests[:1], params._replace(max_new_tokens=8))  # warms up
                found[sampler, batch] = send(endpoint, client, self.requests, params)
        return Answered(f"{options.engine} {endpoint.version()}".strip(), found)

    def _served(
        self,
        card: Scorecard,
        setting: tuple[Sampler, int],
        traffic: Traffic,
        engine: str,
        plain: Answered | None,
        drafter: Drafter,
        target: Target,
        answers: Answers,
    ) -> Served:
        """Figures of one setting and of the scorecard's row of the same chain."""
        (sampler, batch), acceptance = setting, served_acceptance(traffic.reading, traffic.histograms)
        if not acceptance.rounds or not acceptance.survival:
            raise UserError(f"score.engine: {engine} answered {traffic.prompts} prompts and drafted nothing")
        depth = traffic.reading.depth or len(acceptance.survival)
        again = f"score.plans=[{{depth: {depth}}}]"
        row = matching_row(card, depth, sampler.temperature, None, again)
        result = compare(acceptance, row, TOLERANCE, same_prompts(card, row, traffic.digest))
        facts = ServerFacts(
            card.checkpoint.target, [], "", depth, traffic.answer_tokens, sampler.temperature > 0
        )
        texts, without = None, plain.by_setting[setting] if plain else None
        prompts = [request.tokens for request in self.requests]
        excess = excess_of(target, prompts, _tokens(traffic), sampler) if sampler.temperature else None
        if without and not sampler.temperature:
            counts = compare_texts(target, prompts, _tokens(without), _tokens(traffic))
            texts = list(counts)
        rollouts = list(answers.get(sampler, []))
        # Batched answers come in any order; sampled ones are random.
        ours = row.counts.rounds if batch == 1 and not sampler.temperature else []
        alike = _alike(traffic, rollouts, ours)
        same = [sum(one.same for one in alike), len(alike)] if alike else None
        served = Served(
            engine=engine,
            decode=row.decode,
            temperature=sampler.temperature,
            batch_size=batch,
            depth=depth,
            prompts=traffic.prompts,
            tokens=traffic.answer_tokens or 0,
            rounds=round(acceptance.rounds),
            tau=acceptance.tau,
            survival=[figure.served for figure in result.survival],
            scored_tau=result.tau.scored,
            scored_survival=[figure.scored for figure in result.survival],
            noise=[max(figure.noise, figure.tolerance) for figure in result.survival],
            tokens_per_second=_rate(traffic),
            plain_tokens_per_second=_rate(without) if without else None,
            texts=texts,
            same_rounds=same,
            agrees=result.agrees,
            cause=next(iter(causes(result, facts)), "") if not result.agrees else "",
            excess=[excess.nats, excess.error] if excess else None,
        )
        if excess and not excess.by_chance:
            return replace(served, agrees=False, cause=_other_text(excess, target))
        if served.agrees and (same is None or same[0] >= SAME * same[1]):
            return served
        rounds = [one.rounds for one in alike] if alike else None
        kept = [one.rollout for one in alike] or rollouts
        target.tap(drafter.taps)
        cause = likeliest(drafter, target, kept, sampler, Seen(served.survival, served.noise, rounds))
        return replace(served, agrees=served.agrees and not cause, cause=cause or served.cause)


def _fault(folder: Path, target: Target) -> str:
    """Error that our own reader finds in an export that an engine rejected; "" if none."""
    try:
        if formats.find_reader(read_config(folder)):
            load(folder, target)
    except UserError as error:
        return f". The export is broken: {str(error).removeprefix(f'{folder}: ')}"
    return ""


def _other_text(excess: Excess, target: Target) -> str:
    """That sampled answers are not the target's, and why, if that is known."""
    impossible = f", and {excess.impossible:.0%} have no chance" if excess.impossible else ""
    known = f"; {CPU_DRAWS}" if target.device.type == "cpu" else ""
    return (
        f"its answers are not drawn from the target: their tokens are {excess.nats:+.2f} nats "
        f"(standard error {excess.error:.2f}) from its entropy{impossible}{known}"
    )


class Alike(NamedTuple):
    """An engine's answer that equals the target's answer.

    Attributes:
        rollout: the answer.
        rounds: rounds that the engine took.
        same: whether replay takes as many rounds.
    """

    rollout: Rollout
    rounds: int
    same: bool


def _alike(traffic: Traffic, rollouts: Sequence[Rollout], ours: Sequence[float]) -> list[Alike]:
    """Answers that can be compared one by one; empty if the engine does not count their rounds."""
    if not len(traffic.histograms) == len(traffic.answers) == len(rollouts) == len(ours):
        return []
    counted = [sum(histogram) for histogram in traffic.histograms]
    parts = zip(rollouts, traffic.answers, counted, ours, strict=True)
    return [
        Alike(rollout, rounds, rounds == round(here))
        for rollout, answer, rounds, here in parts
        if answer.tokens == rollout.answer
    ]


def _tokens(traffic: Traffic) -> list[list[int]]:
    return [answer.tokens for answer in traffic.answers]


def _rate(traffic: Traffic) -> float:
    """Tokens a second."""
    return (traffic.answer_tokens or 0) / max(traffic.seconds, 1e-9)
