"""Answering one prompt on a terminal: the text as it comes, what was drafted in colour, the speed."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import replace

from transformers import PreTrainedTokenizerBase

from decode.errors import UserError
from decode.generation.text import Detokenizer
from decode.generation.types import Output, Piece, Times
from decode.plan import Plan
from distill.config.build import build_target, quiet, read_chat
from distill.options import GenerateOptions
from distill.scoring.scorer import threads
from distill.text_generation import Model, TextGenerator
from distill.utils.progress import wants_color
from drafters.checkpoint import io as hub

DRAFTED, PLAIN = "\x1b[32m", "\x1b[0m"
WARM_UP = 8  # tokens


def answer(options: GenerateOptions) -> float:
    """Print the answer to a prompt on stdout, and its figures on stderr.

    Args:
        options: of the command.

    Returns:
        tau, 0 without a drafter.

    Raises:
        UserError: a prompt that is empty, no text or too long; no drafter in `checkpoint`.
    """
    quiet()
    color, prompt = wants_color(options.color), read_prompt(options.prompt)
    chat = read_chat(options.target, options.prompts.template, options.prompts.template_options)
    plan = options.decode if options.checkpoint else Plan()
    if not isinstance(plan, Plan):
        raise UserError(
            "decode=auto and decode=calibrated find their plans where a checkpoint is scored, and leave them "
            "in its score.json; name one here"
        )
    target = build_target(options.target)
    model = Model(target, chat)
    drafter = hub.load(hub.fetch(options.checkpoint), target) if options.checkpoint else None
    ids = model.encode(prompt)
    stop = [str(s).replace("\\n", "\n") for s in options.stop]
    drafting = TextGenerator(
        model, drafter, plan, options.sampling, options.max_new_tokens, stop, options.seed
    )
    verifier = drafting.tapped_target()
    # Of a tuned target, plain decoding is the tuned target's too.
    plainly = replace(drafting, model=Model(verifier, chat), drafter=None)
    both = drafter is not None and options.plain
    with threads(options.threads):
        for generator in [drafting, plainly] if both else [drafting]:  # warm up allocator and kernels
            replace(generator, max_new_tokens=min(WARM_UP, options.max_new_tokens)).generate([ids])
        last = show(drafting.stream(ids), chat.tokenizer, color)
        line = figures(plan, last.output, last.times)
        if both:
            plain = plainly.generate([ids])
            line += versus(speed(last.output, last.times), speed(plain.outputs[0], plain.times))
    line += "; lossless to the tuned target" if verifier is not target else ""
    print(line, file=sys.stderr, flush=True)
    return last.output.tau


def read_prompt(given: str) -> str:
    """The prompt, or what stdin holds where it is `-`.

    Raises:
        UserError: there is nothing in it, or it is no text.
    """
    try:
        text = sys.stdin.read().removesuffix("\n") if given == "-" else str(given)
        text.encode()
    except UnicodeError:
        raise UserError("prompt: not UTF-8") from None
    if not text.strip():
        raise UserError("prompt: it is empty; give some text, or prompt=- to read it from stdin")
    return text


def show(pieces: Iterable[Piece], tokenizer: PreTrainedTokenizerBase, color: bool) -> Piece:
    """Print the text of a stream as it comes; returns the last piece.

    A character has the colour of the token that completes it.
    """
    text, piece = Detokenizer(tokenizer, skip_special_tokens=True), None
    if color:
        print(f"{DRAFTED}accepted draft tokens{PLAIN}, the target's own tokens\n")
    for piece in pieces:
        for token, drafted in zip(piece.tokens, piece.drafted, strict=True):
            part = text.add(token)
            print(f"{DRAFTED}{part}{PLAIN}" if color and drafted and part else part, end="")
        sys.stdout.flush()
    print(text.end(), flush=True)
    assert piece is not None, "a stream has at least the prefill's piece"
    return piece


def speed(output: Output, times: Times) -> float:
    """Tokens a second, the prompt's pass and the token it gives excluded, as scores have it."""
    return sum(output.emitted) / times.total if times.total else 0.0


def figures(plan: Plan, output: Output, times: Times) -> str:
    """What is said of a run."""
    tau = f"tau {output.tau:.2f}, " if plan.depth else ""
    count = len(output.tokens)
    return f"{plan.name}: {count} token{'s' * (count > 1)}, {tau}{speed(output, times):.0f} tokens/s"


def versus(mine: float, plain: float) -> str:
    """What is said of plain decoding beside it."""
    return f"; plain {plain:.0f} tokens/s ({mine / plain:.2f}x)" if plain else ""
