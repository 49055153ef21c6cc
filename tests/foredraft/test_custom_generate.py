"""`custom_generate=foredraft.assist(drafter)`: texts of transformers' `generate`, argument by argument."""

import json
import re
import threading

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LogitsProcessor,
    StoppingCriteria,
    TextIteratorStreamer,
    WatermarkingConfig,
    pipeline,
)
from transformers.generation import MaxTimeCriteria, RepetitionPenaltyLogitsProcessor
from transformers.generation.streamers import BaseStreamer
from workbench import ROOT

import foredraft
from decode.errors import UserError
from decode.model.load import target_of
from distill.config.build import build_drafter
from distill.config.compose import compose
from distill.config.read import checked_options
from distill.options.run import TrainOptions
from distill.utils.paths import CONF
from foredraft.hf_arguments import SUPPORTED, WHY, WITHOUT_EFFECT, check_config

TEXTS = ["How do I use grep?", "Write a poem about the sea.", "Hi"]


class Last(LogitsProcessor):
    """A user's processor: no token twice in a row."""

    def __call__(self, input_ids, scores):
        return scores.scatter(1, input_ids[:, -1:], -torch.inf)


class EndsAfter(StoppingCriteria):
    """A user's criterion: a token of the text is divisible by 7."""

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids[:, -1] % 7 == 0


class Columns(BaseStreamer):
    """What a streamer of a batch is given."""

    def __init__(self):
        self.given, self.ended = [], 0

    def put(self, value):
        self.given.append(value.tolist())

    def end(self):
        self.ended += 1


@pytest.fixture(scope="module")
def pocket():
    """The bundled target in fp32 with its tokenizer, and its draft model as a drafter."""
    folder = ROOT / "data" / "pocket"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    options = checked_options(
        TrainOptions,
        compose(["drafter=lm", f"drafter.path={ROOT / 'data' / 'pocket-draft'}"], CONF),
        announce=False,
    )
    drafter = build_drafter(options.drafter, target_of(model)).eval().requires_grad_(False)
    return model, tokenizer, drafter


def encoded(tokenizer, texts):
    rows = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
        )
        for text in texts
    ]
    found = tokenizer(rows, return_tensors="pt", padding=True, add_special_tokens=False)
    return {name: found[name] for name in ("input_ids", "attention_mask")}


def both(pocket, texts=TEXTS, plan=None, **options):
    model, tokenizer, drafter = pocket
    inputs = encoded(tokenizer, texts) | {"max_new_tokens": 16, "do_sample": False} | options
    assisted = foredraft.assist(drafter, plan=plan)
    return model.generate(**inputs), model.generate(**inputs, custom_generate=assisted), assisted


# Arguments that are supported, with values most of which change the greedy text.
CHANGES = {
    "max_length": {"max_length": 30, "max_new_tokens": None},
    "min_new_tokens": {"min_new_tokens": 24, "max_new_tokens": 30},
    "min_length": {"min_length": 40, "max_new_tokens": 30},
    "repetition_penalty": {"repetition_penalty": 1.3},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 1.5},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "encoder_no_repeat_ngram_size": {"encoder_no_repeat_ngram_size": 1},
    "bad_words_ids": {"bad_words_ids": [[13], [20, 21]]},
    "sequence_bias": {"sequence_bias": [[[300], 4.0], [[400, 401], 3.0]]},
    "suppress_tokens": {"suppress_tokens": list(range(200, 400))},
    "begin_suppress_tokens": {"begin_suppress_tokens": list(range(5, 2000))},
    "forced_eos_token_id": {"forced_eos_token_id": 3},
    "exponential_decay_length_penalty": {"exponential_decay_length_penalty": (4, 1.5)},
    "eos_token_id": {"eos_token_id": [3, 13, 300]},
    "pad_token_id": {"pad_token_id": 5, "eos_token_id": [3, 13, 300]},
    "renormalize_logits": {"renormalize_logits": True},
    "watermarking_config": {"watermarking_config": WatermarkingConfig(bias=3.0)},
    "logits_processor": {"logits_processor": [Last()]},
    "a penalty of one's own": {"logits_processor": [RepetitionPenaltyLogitsProcessor(1.3, 4)]},
    "stopping_criteria": {"stopping_criteria": [EndsAfter()]},
    "several": {"repetition_penalty": 1.2, "no_repeat_ngram_size": 3, "min_new_tokens": 8},
}


@pytest.mark.proof
def test_text_equals_that_of_generate_with_each_argument(pocket):
    model = pocket[0]
    grads = [weight.requires_grad for weight in model.parameters()]
    expected, got, assisted = both(pocket)
    assert torch.equal(expected, got)
    assert assisted.tau > 1.5
    free, changed = expected.tolist(), 0
    for name, options in CHANGES.items():
        expected, got, _ = both(pocket, **options)
        assert expected.tolist() == got.tolist(), name
        changed += expected.tolist() != free
    assert changed > len(CHANGES) / 2
    assert [weight.requires_grad for weight in model.parameters()] == grads


def test_chain_and_single_prompt_have_the_same_text(pocket):
    for options in ({"plan": "chain"}, {"texts": TEXTS[:1]}, {"texts": TEXTS[:1], "plan": foredraft.Plan(3)}):
        for more in ({}, {"no_repeat_ngram_size": 2}):
            expected, got, _ = both(pocket, **options, **more)
            assert torch.equal(expected, got)


def test_stop_strings_end_a_text_where_generate_ends_it(pocket):
    tokenizer = pocket[1]
    stops = {"stop_strings": [" a", "\n"], "tokenizer": tokenizer}
    expected, got, _ = both(pocket, **stops)
    free, _, _ = both(pocket)
    assert expected.tolist() == got.tolist() != free.tolist()


def test_outputs_are_those_of_generate(pocket):
    model, tokenizer, drafter = pocket
    expected, got, _ = both(pocket, return_dict_in_generate=True)
    assert torch.equal(expected.sequences, got.sequences)
    inputs = encoded(tokenizer, TEXTS[:2]) | {"max_new_tokens": 8, "do_sample": True}
    torch.manual_seed(0)
    several = [
        model.generate(**inputs, num_return_sequences=3, custom_generate=foredraft.assist(drafter))
        for _ in range(2)
    ]
    torch.manual_seed(0)
    again = model.generate(**inputs, num_return_sequences=3, custom_generate=foredraft.assist(drafter))
    assert several[0].shape[0] == 6
    assert torch.equal(several[0], again)
    assert several[0].tolist() != several[1].tolist()
    timed = model.generate(
        **inputs, stopping_criteria=[MaxTimeCriteria(0.0)], custom_generate=foredraft.assist(drafter)
    )
    assert timed.shape[1] == inputs["input_ids"].shape[1] + 1


def test_streamers_of_a_text_and_of_a_batch_are_fed(pocket):
    model, tokenizer, drafter = pocket
    expected, mine = Columns(), Columns()
    inputs = encoded(tokenizer, TEXTS) | {"max_new_tokens": 40, "do_sample": False}
    model.generate(**inputs, streamer=expected)
    model.generate(**inputs, streamer=mine, custom_generate=foredraft.assist(drafter))
    assert (mine.given, mine.ended) == (expected.given, 1)
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
    options = encoded(tokenizer, TEXTS[:1]) | {"max_new_tokens": 12, "do_sample": False}
    call = options | {"streamer": streamer, "custom_generate": foredraft.assist(drafter)}
    thread = threading.Thread(target=model.generate, kwargs=call)
    thread.start()
    text = "".join(streamer)
    thread.join()
    whole = model.generate(**options)[0, options["input_ids"].shape[1] :]
    assert text == tokenizer.decode(whole)


def test_pipeline_of_transformers_decodes_with_a_drafter(pocket):
    model, tokenizer, drafter = pocket
    ask = pipeline("text-generation", model=model, tokenizer=tokenizer)
    options = {"max_new_tokens": 12, "do_sample": False}
    assert ask("Hi", **options) == ask("Hi", **options, custom_generate=foredraft.assist(drafter))


@pytest.mark.proof
def test_draws_have_the_distribution_of_generate(pocket):
    """First tokens after one prompt, of 400 rows each; total variation of two samples of this size."""
    model, tokenizer, drafter = pocket
    inputs = encoded(tokenizer, TEXTS[:1])
    inputs |= {"max_new_tokens": 2, "do_sample": True, "top_k": 8, "temperature": 0.9, "min_p": 0.02}
    inputs |= {"num_return_sequences": 400, "no_repeat_ngram_size": 1}
    torch.manual_seed(1)
    counts = []
    for more in ({}, {"custom_generate": foredraft.assist(drafter)}):
        drawn = model.generate(**inputs, **more)[:, -1]
        counts.append(torch.bincount(drawn, minlength=model.config.vocab_size).double() / 400)
    assert float((counts[0] - counts[1]).abs().sum()) / 2 < 0.15
    assert int((counts[0] > 0).sum()) > 3


REFUSED = {
    "num_beams": 2,
    "use_cache": False,
    "cache_implementation": "static",
    "output_scores": True,
    "output_logits": True,
    "output_attentions": True,
    "output_hidden_states": True,
    "num_assistant_tokens": 3,
    "prompt_lookup_num_tokens": 3,
    "remove_invalid_values": True,
    "guidance_scale": 1.5,
    "prefill_chunk_size": 4,
}


def test_argument_that_is_not_supported_is_named(pocket):
    model, tokenizer, drafter = pocket
    inputs = encoded(tokenizer, TEXTS[:1]) | {"max_new_tokens": 4}
    assisted = foredraft.assist(drafter)
    right = {"attention_mask": inputs["attention_mask"].clone()}
    right["attention_mask"][:, -1] = 0
    cases = {name: ({name: value}, rf"generate: {name}=") for name, value in REFUSED.items()}
    cases |= {
        "assistant_model": ({"assistant_model": model}, "assistant_model with"),
        "synced_gpus": ({"synced_gpus": True}, "synced_gpus=True"),
        "padding": (right, "pad prompts on the left"),
        "positions": (
            {"position_ids": torch.arange(3, 3 + inputs["input_ids"].shape[1])[None]},
            "position_ids",
        ),
        "context": ({"max_new_tokens": 5000}, "more than the model's context"),
        "prefix": (
            {
                "prefix_allowed_tokens_fn": lambda row, ids: [5, 6],
                "num_return_sequences": 2,
                "do_sample": True,
            },
            "one prompt at a time",
        ),
    }
    for name, (options, said) in cases.items():
        with pytest.raises(UserError, match=said) as caught:
            model.generate(**(inputs | options), custom_generate=assisted)
        assert "\n" not in str(caught.value), name
    embedded = model.get_input_embeddings()(inputs["input_ids"])
    with pytest.raises(UserError, match="inputs_embeds"):
        model.generate(inputs_embeds=embedded, max_new_tokens=4, custom_generate=assisted)


def test_field_of_a_newer_transformers_is_refused_until_it_is_known(monkeypatch):
    names = set(vars(GenerationConfig()))
    assert names >= SUPPORTED - {"_commit_hash"}
    begin = GenerationConfig.__init__

    def newer(self, **fields):
        future = fields.pop("novel_decoding", None)
        begin(self, **fields)
        self.novel_decoding = future

    monkeypatch.setattr(GenerationConfig, "__init__", newer)
    check_config(GenerationConfig())
    with pytest.raises(UserError, match="novel_decoding=True"):
        check_config(GenerationConfig(novel_decoding=True))


def test_page_lists_the_arguments_that_are_supported_and_refused():
    page = (ROOT / "docs" / "notebook.md").read_text()
    supported, refused = page.partition("| supported |")[2].split("| refused |")
    public = {name for name in SUPPORTED | WITHOUT_EFFECT if name[0] != "_"} - {"transformers_version"}
    assert not {name for name in public if not re.search(rf"`{name}\b", supported)}
    assert not {name for name in WHY if not re.search(rf"`{name}\b", refused)}


@pytest.mark.proof
def test_hundred_prompts_have_the_texts_of_generate(pocket):
    lines = (ROOT / "data" / "prompts" / "heldout.jsonl").read_text().splitlines()[:100]
    texts = [json.loads(line)["messages"][0]["content"] for line in lines]
    for at in range(0, 100, 10):
        for options in ({}, {"repetition_penalty": 1.2}, {"no_repeat_ngram_size": 3}):
            expected, got, _ = both(pocket, texts[at : at + 10], max_new_tokens=64, **options)
            assert torch.equal(expected, got)
