"""An MTP head in vLLM itself: a target of MiMo's class, and one of a class that has no MTP."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from engine_process import ask_script
from fitting import fit
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM
from vllm_on_cpu import SETTINGS

from decode.evaluation.replay import replay
from decode.evaluation.teacher_forced import Rollout
from decode.model.load import load_target
from decode.plan import Plan
from decode.sampling import Sampler
from distill.scoring.served import figures
from drafters.base import Batch, Drafter
from drafters.checkpoint import io as checkpoint_io
from drafters.export import formats
from drafters.hf.mtp_weights import Arrangement
from drafters.models.mtp import Mtp

V, DEPTH, TOKENS, STEPS = 256, 3, 48, 150
SERVER = """
import json, sys
from vllm import LLM, SamplingParams
if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    llm = LLM(given["target"], dtype="float32", enforce_eager=True, max_model_len=128, max_num_seqs=1,
              skip_tokenizer_init=True, enable_prefix_caching=False, disable_log_stats=False, seed=0,
              hf_overrides=given["overrides"], speculative_config=given["speculative"])
    prompts = [{"prompt_token_ids": ids} for ids in given["prompts"]]
    options = SamplingParams(temperature=0.0, max_tokens=given["tokens"], ignore_eos=True, detokenize=False)
    found = llm.generate(prompts, options, use_tqdm=False)
    counts = {m.name: getattr(m, "values", None) or getattr(m, "value", None) for m in llm.get_metrics()
              if "spec_decode" in m.name}
    print(json.dumps([[list(o.outputs[0].token_ids) for o in found], counts]))
"""
KINDS = {
    "MiMoForCausalLM": (Qwen2Config, Qwen2ForCausalLM, {"num_nextn_predict_layers": 1}),
    "LlamaForCausalLM": (LlamaConfig, LlamaForCausalLM, {}),
}


def target_of(kind: str, folder: Path):
    """A random target with heads of 32, as vLLM's attention on a CPU wants them, in fp32."""
    config, model, more = KINDS[kind]
    sizes = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 3, "vocab_size": V}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
    ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    torch.manual_seed(0)
    made = model(config(**sizes, **heads, **ends, tie_word_embeddings=False))
    for weight in made.parameters():
        weight.data = weight.data * 6 if weight.dim() > 1 else weight + 0.3 * torch.rand_like(weight)
    made.save_pretrained(folder)
    written = json.loads((folder / "config.json").read_text()) | more | {"architectures": [kind]}
    (folder / "config.json").write_text(json.dumps(written))
    return load_target(str(folder), "float32")


@torch.no_grad()
def answers(target, prompts: torch.Tensor) -> torch.Tensor:
    found = prompts
    for _ in range(TOKENS):
        found = torch.cat([found, target.head(target.read(found).last[:, -1:]).argmax(-1)], 1)
    return found


def fitted(target, texts: torch.Tensor) -> Drafter:
    """A head that knows these texts."""
    options = {"path": None, "draft_vocab_size": None} | dict.fromkeys(Arrangement._fields)
    head = Mtp.for_target(target, depth=DEPTH, **options).train()
    target.tap(head.taps)
    read = target.read(texts)
    batch = Batch(texts, torch.ones_like(texts, dtype=torch.bool), read.taps, read.last)
    return fit(head, target, batch, 3e-3, STEPS)


def served(python: Path, target, drafter, folder: Path, prompts: list[list[int]]):
    """Answers and counters of vLLM, with the settings of the exported command."""
    layout = formats.write_layout(checkpoint_io.as_saved(drafter), target, "vllm")
    folder.mkdir()
    layout.write(folder)
    command = layout.command(target.model.name_or_path, str(folder)).replace("'", "").split(" --")[1:]
    given = {name: json.loads(value) for name, value in (part.split(" ", 1) for part in command)}
    asked = {"target": target.model.name_or_path, "overrides": given.get("hf-overrides", {})}
    asked |= {"speculative": given["speculative-config"], "prompts": prompts, "tokens": TOKENS}
    script = folder / "serve.py"
    script.write_text(SERVER)
    return ask_script(python, script, asked, variables=SETTINGS)


@pytest.mark.engine
@pytest.mark.parametrize("kind", KINDS)
def test_vllm_accepts_of_an_mtp_head_what_replay_says(vllm_python, engine_row, tmp_path, kind):
    target = target_of(kind, tmp_path / "target")
    dice = torch.Generator().manual_seed(1)
    prompts = torch.randint(V, (8, 12), generator=dice)
    texts = answers(target, prompts)
    drafter = fitted(target, texts[:6])  # two texts are new to it
    (found, counts) = served(vllm_python, target, drafter, tmp_path / "drafter", prompts.tolist())
    plain = texts[:, prompts.shape[1] :].tolist()
    rollouts = [Rollout(row[:12], row[12:]) for row in texts.tolist()]
    (ours,) = replay(target, drafter, rollouts, [Plan(depth=DEPTH)], Sampler(0.0))
    rounds = counts["vllm:spec_decode_num_drafts"]
    there = [count / rounds for count in counts["vllm:spec_decode_num_accepted_tokens_per_pos"]]
    equal = f"{sum(map(list.__eq__, found, plain))} of {len(plain)} equal"
    name = f"MTP, beside a random {kind.removesuffix('ForCausalLM')}"
    engine_row(name, "vllm", "vllm 0.32.0", equal, figures(ours.survival), figures(there))
    assert found == plain
    assert there[0] > 0.2  # else there is nothing to compare
    # vLLM's first pair has no token, so a few rounds may differ.
    assert there == pytest.approx(ours.survival, abs=0.05)
