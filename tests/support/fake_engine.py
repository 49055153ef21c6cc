"""A server that counts drafted and accepted tokens as vLLM or SGLang does, and a scorecard of its drafter."""

import random
from copy import deepcopy
from functools import cache

import cards
from fake_server import FakeServer

from decode.evaluation.replay import Counts

ALPHA = [0.8, 0.7, 0.6]  # of the drafter that was scored
PROMPTS, TOKENS = 24, 100


class Engine(FakeServer):
    """Answers in rounds of a drafter with these chances, and counts them as vLLM or SGLang does."""

    def __init__(self, chat, kind="vllm", alpha=ALPHA, **options):
        super().__init__(chat, **options)
        self.kind, self.alpha, self.dice = kind, list(alpha), random.Random(1)
        self.drafting, self.extra, self.born, self.histograms = True, 0, 1e9, True
        self.detailed = False
        self.reset()
        self.message = self._draft
        self.pages = {"/metrics": lambda: (200, self.page())}

    def reset(self):
        self.answers = self.tokens = self.rounds = 0
        self.kept = [0] * len(self.alpha)

    def _draft(self, body):
        if body["max_tokens"] == 1:
            return {"tokens": [4]}
        with self.lock:
            histogram, rounds = draw(self.dice, self.alpha, TOKENS)
            self.answers += 1
            self.tokens += TOKENS + self.extra
            if self.drafting:
                self.rounds += rounds
                self.kept = [k + sum(histogram[j:]) for j, k in enumerate(self.kept, 1)]
        return {"tokens": [4] * TOKENS, "finish_reason": "length", "rounds": histogram}

    def reply(self, body):
        said = super().reply(body)
        histogram = said["choices"][0].pop("rounds", None)
        if body["max_tokens"] > 1 and self.kind == "vllm" and self.detailed:
            said["metrics"] = {"speculative_decoding": {"acceptance_histogram": histogram}}
        if self.histograms and body.get("return_spec_tokens_details") and body["max_tokens"] > 1:
            said["sglext"] = {"spec_tokens_details": {"spec_correct_drafts_histogram": histogram}}
        return said

    def page(self):
        m = f'model_name="{self.models[0]}"'
        if self.kind == "sglang":
            return (
                f"sglang:spec_num_steps{{{m}}} {len(self.alpha)}\n"
                f"sglang:spec_num_draft_tokens{{{m}}} {len(self.alpha) + 1}\n"
                f"sglang:num_requests_total{{{m}}} {self.answers}\n"
                f"sglang:generation_tokens_total{{{m}}} {self.tokens}\n"
                f"sglang:spec_verify_calls_total{{{m}}} {self.rounds}\n"
            )
        name = "vllm:spec_decode_num_"
        lines = [
            f"process_start_time_seconds {self.born}",
            f"vllm:generation_tokens_total{{{m}}} {self.tokens}",
            f'vllm:request_success_total{{finished_reason="length",{m}}} {self.answers}',
            f"{name}drafts_total{{{m}}} {self.rounds}",
            f"{name}draft_tokens_total{{{m}}} {self.rounds * len(self.alpha)}",
            f"{name}accepted_tokens_total{{{m}}} {sum(self.kept)}",
        ]
        positions = enumerate(self.kept)
        lines += [f'{name}accepted_tokens_per_pos_total{{{m},position="{j}"}} {k}' for j, k in positions]
        return "\n".join(lines) + "\n"


def draw(dice, alpha, tokens):
    """Rounds that keep 0, 1, ... tokens, until so many are written, the first by the prefill."""
    histogram, written = [0] * (len(alpha) + 1), 1
    while written < tokens:
        kept = next((j for j, chance in enumerate(alpha) if dice.random() >= chance), len(alpha))
        histogram[kept] += 1
        written += kept + 1
    return histogram, sum(histogram)


@cache
def replayed(alpha):
    dice = random.Random(2)
    answers = [draw(dice, alpha, TOKENS) for _ in range(PROMPTS)]
    rounds = [float(n) for _, n in answers]
    counts = Counts([TOKENS - 1] * PROMPTS, rounds)
    survival = [sum(sum(h[j:]) for h, _ in answers) / sum(rounds) for j in range(1, len(alpha) + 1)]
    return cards.replay(counts.tau, counts, tau_interval=counts.interval(), survival=survival)


def a_row(alpha=ALPHA, temperature=0.0):
    return cards.row(temperature, decode=f"chain-{len(alpha)}", replay=deepcopy(replayed(tuple(alpha))))


def a_card(target, rows, **more):
    facts = {"target": str(target), "max_new_tokens": TOKENS, "prompts": 16, "seed": 0, "step": 7}
    return cards.scorecard(rows, **{**facts, **more})
