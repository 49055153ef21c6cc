"""foredraft inspect: a target, what is read of its files, and what it can be used for."""

import json

import pytest
import torch
from chats import tokenizer_of
from elsewhere import TARGETS
from ggufs import write_gguf
from safetensors.torch import load_file, save_file
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
from workbench import foredraft, make_target

from decode.model.files.account import Account, say_once
from decode.model.gguf import converted


@pytest.fixture(autouse=True)
def fresh(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    say_once.cache_clear()


def shown(*argv):
    return foredraft("inspect", *argv).succeeded()


@pytest.fixture
def llama3(tmp_path):
    """A tiny Llama-3: scaled positions, two ends, sampling that engines apply."""
    folder, tokenizer = tmp_path / "llama3", tokenizer_of("llama3")
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    rope = {"rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0, "low_freq_factor": 1.0}
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    ends = [tokenizer.eos_token_id, tokenizer.bos_token_id]
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
    config = LlamaConfig(vocab_size=len(tokenizer), rope_parameters=rope, **sizes, **heads, eos_token_id=ends)
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(do_sample=True, temperature=0.6, top_p=0.9, eos_token_id=ends)
    model.save_pretrained(folder)
    return folder


def test_bundled_target_fits_one_screen():
    out = shown().out
    assert len(out.splitlines()) <= 24
    for text in (
        "data/pocket: LlamaForCausalLM in bfloat16",
        "layers 12, hidden 256, heads 4, heads of keys and values 2, vocabulary 4,096, context 2,048",
        "110 tensors read",
        "generation_config.json: '<|end|>' (3)",
        "tools: dropped",
        "prompt ends with: '<|assistant|>'",
        "decode: yes",
    ):
        assert text in out


def test_llama3_folder(llama3, tmp_path):
    done = shown(f"target={llama3}", f"out={tmp_path / 'found.json'}")
    for text in (
        "temperature=0.6 and 1 more: engines apply it by default",
        "'<|eot_id|>'",
        "engines apply           temperature=0.6, top_p=0.9\n",
        *("tools: kept", "tool calls: kept", "system prompt: kept"),
        r"prompt ends with: '<|start_header_id|>assistant<|end_header_id|>\n\n'",
    ):
        assert text in done.out
    assert "writes past" not in done.out  # the files name every end that is written, and one more
    assert "generation_config" not in done.err  # said once, in the account
    found = json.loads((tmp_path / "found.json").read_text())
    assert (found["sizes"]["layers"], found["able"]) == (2, {"train": "", "replay": "", "decode": ""})


def test_end_that_only_the_template_writes_is_shown(llama3):
    file = llama3 / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": 262}))
    out = shown(f"target={llama3}").out
    assert "chat template: '<|eot_id|>' (265)" in out
    assert "only generation_config.json writes past '<|eot_id|>' (265)" in " ".join(out.split())


def test_adapter_and_a_tensor_without_a_place_are_refused(llama3):
    path = llama3 / "model.safetensors"
    weights = load_file(path)
    save_file(weights | {"model.layers.0.self_attn.q_proj.bias": torch.ones(32)}, path)
    foredraft("inspect", f"target={llama3}").refused("q_proj.bias: LlamaForCausalLM has no place")
    save_file(weights, path)
    (llama3 / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    foredraft("inspect", f"target={llama3}").refused("adapter_config.json")


@pytest.mark.parametrize("kind", ["hybrid", "fp8"])
def test_reason_is_shown_where_decoding_is_impossible(kind, tmp_path):
    out = shown(f"target={TARGETS[kind](tmp_path / 'target')}").out
    assert "decode: no: it " in out
    assert "train: yes" in out


def test_model_without_a_tokenizer_or_template(tmp_path):
    folder = make_target(tmp_path / "base", template=None)
    assert "chat template           none; prompts.template=none" in shown(f"target={folder}").out
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (folder / file).unlink()
    assert "no tokenizer" in shown(f"target={folder}").out


OPENS = "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}<think>{% endif %}"
CLOSED = "prompts.template_options={enable_thinking: false}"
TEMPLATES = [
    ("qwen3", [], "reasoning: read from reasoning_content; of the last answer kept, of earlier ones dropped"),
    ("qwen3", [CLOSED], "which has a closed thinking block"),
    ("gemma", [], "system prompt: refused"),
    ("gemma", [], "tool calls: refused"),
    (OPENS, [], "prompt ends with: '<think>', which opens a thinking block"),
]


@pytest.mark.parametrize(("template", "options", "line"), TEMPLATES)
def test_reasoning_thinking_blocks_and_refusals_of_templates(template, options, line, tmp_path):
    text = template if "{" in template else tokenizer_of(template).chat_template
    assert line in shown(f"target={make_target(tmp_path / 'target', template=text)}", *options).out


def test_gguf_file_and_the_account_of_its_conversion(tmp_path):
    path = write_gguf(tmp_path / "tiny.gguf")
    out = shown(f"target={path}").out
    assert "LlamaForCausalLM in bfloat16" in out
    assert "generation_config.json: '<|im_end|>' (2)" in out
    folder, _ = converted(path)
    note = folder / "gguf.json"
    account = Account("GGUF")
    account.count("keys", 20)
    account.remark("what nothing reads", ["x.y"])
    note.write_text(json.dumps(json.loads(note.read_text()) | {"account": account.as_json()}))
    out = shown(f"target={path}").out
    assert "GGUF: 20 keys read" in out
    assert "not read: x.y: what nothing reads" in out
