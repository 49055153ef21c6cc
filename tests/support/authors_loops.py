"""The decoding loops of EAGLE's and Medusa's authors, as their packages have them, on an exported drafter.

    python authors_loops.py KIND TARGET EXPORT PROMPTS MAX_TOKENS TREE

KIND is eagle (eagle-llm 1.2.1) or medusa (medusa-llm 0.1), EXPORT a folder of `to=authors`, PROMPTS a list of
token ids each. TREE is for eagle a list of paths of child ranks, or null for the package's own, and for
medusa the number of children at each depth. The last line of the output has, as JSON, the tree's paths, the
answers as they came and of each the number of drafted tokens that every round accepted. A round writes its
root and what it accepts, so the target's own token of the last round is missing. Runs in an environment with
both packages; must not import foredraft.
"""

from __future__ import annotations

import copy
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch


def main(kind: str, target: str, export: str, prompts: str, max_tokens: str, tree: str) -> None:
    """Answer greedily, in fp32, one prompt after another."""
    loops = {"eagle": Eagle, "medusa": Medusa}[kind](target, Path(export), json.loads(tree))
    end = json.loads((Path(target) / "config.json").read_text())["eos_token_id"]
    answers, accepted = [], []
    for prompt in json.loads(prompts):
        answer: list[int] = []
        rounds: list[int] = []
        for whole in loops.rounds(torch.tensor([prompt])):
            rounds.append(len(whole) - len(answer) - 1)
            answer = whole
            if len(answer) >= int(max_tokens) or end in answer:
                break
        answers.append(answer)
        accepted.append(rounds)
    print(json.dumps({"tree": loops.paths, "answers": answers, "accepted": accepted}))


def without_tokenizer(module: Any) -> None:
    """Put token ids in the place of text.

    This transformers reads no tokenizer of a newer one, and the loops use theirs for the end token and, in
    Medusa, for the text that a round yields.
    """

    def made(folder: str) -> SimpleNamespace:
        config = json.loads((Path(folder) / "config.json").read_text())
        return SimpleNamespace(
            eos_token_id=config["eos_token_id"], decode=lambda ids, **options: ids.tolist()
        )

    module.AutoTokenizer = SimpleNamespace(from_pretrained=made)


class Eagle:
    """`EaModel` of eagle-llm."""

    def __init__(self, target: str, export: Path, paths: list[list[int]] | None) -> None:
        from eagle.model import cnets, ea_model  # pyright: ignore[reportMissingImports]
        from safetensors.torch import load_file

        without_tokenizer(ea_model)
        self.paths = paths or ea_model.mc_sim_7b_63
        cnets.mc_sim_7b_63 = self.paths  # the drafter takes this tree whatever the loop is given
        # The one file of weights that this version reads.
        torch.save(load_file(export / "model.safetensors"), export / "pytorch_model.bin")
        self.model = ea_model.EaModel.from_pretrained(
            base_model_path=target, ea_model_path=str(export), torch_dtype=torch.float32
        ).eval()

    def rounds(self, prompt: torch.Tensor) -> Iterator[list[int]]:
        """The answer after each round."""
        for ids in self.model.ea_generate(prompt, tree_choices=self.paths):
            yield ids[0, prompt.shape[1] :].tolist()


class Medusa:
    """`MedusaModel` of medusa-llm."""

    def __init__(self, target: str, export: Path, widths: list[int]) -> None:
        from medusa.model import medusa_model  # pyright: ignore[reportMissingImports]

        without_tokenizer(medusa_model)
        make = medusa_model.initialize_past_key_values

        def grouped(model: Any) -> Any:
            """It makes a cache of as many heads as there are queries, and the target's keys are fewer."""
            config, heads = copy.copy(model.config), model.config.num_key_value_heads
            config.hidden_size = config.hidden_size // config.num_attention_heads * heads
            config.num_attention_heads = heads
            return make(SimpleNamespace(config=config, device=model.device, dtype=model.dtype))

        medusa_model.initialize_past_key_values = grouped
        self.widths, levels = widths, [range(width) for width in widths]
        self.paths = [path for n in range(len(widths)) for path in itertools.product(*levels[: n + 1])]
        self.model = medusa_model.MedusaModel.from_pretrained(str(export), torch_dtype=torch.float32).eval()
        assert self.model.base_model_name_or_path == target

    @torch.no_grad()
    def rounds(self, prompt: torch.Tensor) -> Iterator[list[int]]:
        """The answer after each round."""
        for found in self.model.medusa_generate(prompt, medusa_choices=[1, *self.widths]):
            yield found["text"]


if __name__ == "__main__":
    main(*sys.argv[1:])
