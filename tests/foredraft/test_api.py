"""The Python interface: load, generate, stream and score, and what they refuse."""

import dataclasses
import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from workbench import QUICK, ROOT, make_target

import foredraft
from decode.errors import UserError
from decode.evaluation.scorecard import read_scorecard
from decode.generation.generate import generate
from decode.model.load import load_target
from decode.plan import Plan
from decode.sampling import Sampler
from distill.text_generation import TextGenerator
from drafters.checkpoint import io as checkpoint_io


@pytest.fixture(scope="module")
def folders(tmp_path_factory, make_drafter):
    """A tiny chat model and an untrained drafter for it."""
    root = tmp_path_factory.mktemp("api")
    target = load_target(str(make_target(root / "target")))
    (root / "drafter").mkdir()
    checkpoint_io.save(make_drafter("eagle", target), target, root / "drafter", str(root / "target"))
    return root


@pytest.fixture(scope="module")
def loaded(folders):
    """The model in float32, and its drafter."""
    model = foredraft.load_target(str(folders / "target"), dtype="float32")
    return model, foredraft.load_drafter(str(folders / "drafter"), model)


def test_documented_lines_run_from_any_folder(folders, tmp_path, monkeypatch, capsys):
    text = (ROOT / "docs" / "notebook.md").read_text()
    (block,) = re.findall(r"```python\n(import foredraft\n.*?)```", text, re.S)
    monkeypatch.chdir(tmp_path)
    block = block.replace("data/pocket", str(folders / "target"))
    block = block.replace("outputs/<date>/<time>/checkpoints/best", str(folders / "drafter"))
    exec(block, {})  # noqa: S102  our own document
    assert float(capsys.readouterr().out.splitlines()[-1]) >= 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafter_changes_no_greedy_answer_and_stream_is_what_is_generated(loaded, temperature):
    model, drafter = loaded
    options = {"max_new_tokens": 12, "temperature": temperature}
    prompt = [{"role": "user", "content": "say 3"}]
    drafted = foredraft.generate(model, "say 3", drafter, **options)
    assert drafted.tokens == foredraft.generate(model, prompt, drafter, **options).tokens
    assert "".join(foredraft.stream(model, prompt, drafter, **options)) == drafted.text
    if not temperature:
        assert foredraft.generate(model, prompt, **options).tokens == drafted.tokens
    card = foredraft.score(model, drafter, ["say 3", prompt], temperatures=[temperature], max_new_tokens=6)
    assert card.audit_passed
    assert card.replay_agrees
    assert card.rows[0].replay
    assert card.rows[0].replay.method.startswith("estimate" if temperature else "exact")  # a hybrid tree


def test_several_prompts_are_answered_in_one_batch(loaded):
    model, drafter = loaded
    prompts = ["say 3", [{"role": "user", "content": "count to ten"}]]
    answers = foredraft.generate(model, prompts, drafter, max_new_tokens=8)
    assert answers[0].tokens != answers[1].tokens
    single = [foredraft.generate(model, prompt, drafter, max_new_tokens=8) for prompt in prompts]
    assert [(a.tokens, a.text) for a in answers] == [(a.tokens, a.text) for a in single]


def test_typed_contents_and_single_messages_are_read(loaded):
    """vLLM's issue 9358: the prompt held Python's text of the list."""
    model, drafter = loaded
    options = {"max_new_tokens": 6}
    message = {"role": "user", "content": [{"type": "text", "text": "say 3"}]}
    plain = foredraft.generate(model, "say 3", **options)
    for prompt in (message, [message], (message,)):
        assert foredraft.generate(model, prompt, **options).tokens == plain.tokens
        assert "".join(foredraft.stream(model, prompt, **options)) == plain.text
    prompts = (["say 3"], "say 3", [message], [[message]])
    cards = [foredraft.score(model, drafter, prompt, **options) for prompt in prompts]
    assert len({card.rows[0].tokens for card in cards}) == 1


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        (b"say 3", "not bytes"),
        (3, "not int"),
        (None, "not null"),
        ("", "message 1 .user.: it needs a text"),
        ([None], "not null"),
        ([[]], "nothing to answer"),
        (["say 3", 4], "not int"),
        ([{"role": "robot", "content": "say 3"}], "'robot' is no role"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "image_url"),
        ([{"role": "user", "content": "say 3", "colour": "red"}], r"nothing reads messages\.colour"),
        ("<|user|>say 3<|assistant|>", r"rendered already: <\|\w+\|> .*prompts\.template=none"),
    ],
)
def test_wrong_prompt_is_refused_in_one_line(prompt, said, loaded):
    model, drafter = loaded
    calls = [lambda: foredraft.generate(model, prompt), lambda: foredraft.score(model, drafter, prompt)]
    if not isinstance(prompt, list):
        calls.append(lambda: foredraft.stream(model, prompt))
    for call in calls:
        with pytest.raises(UserError, match=said) as caught:
            call()
        assert "\n" not in str(caught.value)


def test_tuned_target_is_merged_once(folders, loaded, monkeypatch):
    """Merging copies the decoder layers."""
    model, drafter = loaded
    tuned = foredraft.load_target(str(folders / "target"), dtype="float32").target
    merged = []
    monkeypatch.setattr(drafter, "verifier", lambda target: merged.append(target) or tuned)
    answers = [foredraft.generate(model, "say 3", drafter, max_new_tokens=4).tokens for _ in range(2)]
    answers.append(foredraft.generate(model, "say 3", max_new_tokens=4).tokens)
    assert answers[0] == answers[1] == answers[2]
    assert merged == [model.target]
    assert (tuned.taps, model.target.taps) == (drafter.taps, ())


def test_wrong_calls_are_refused(folders, loaded):
    model, drafter = loaded
    with pytest.raises(UserError, match="no such option"):
        foredraft.load_target(str(folders / "target"), "target.dtpye=float32")
    with pytest.raises(UserError):
        foredraft.load_drafter(str(folders / "nowhere"), model)
    with pytest.raises(UserError, match="no prompts"):
        foredraft.score(model, drafter, [])
    with pytest.raises(UserError, match="no prompts"):
        foredraft.generate(model, [], drafter)
    with pytest.raises(AttributeError, match="no attribute 'lode'"):
        _ = foredraft.lode
    model.target.tap(())
    with pytest.raises(UserError, match=r"reads hidden states .* call target.tap\(drafter.taps\)"):
        generate(model.target, drafter, [[1, 2]], max_new_tokens=4, sampler=Sampler(0.0), plan=Plan(2))


def test_number_of_any_type_gives_the_same_answers_and_scores(loaded):
    model, drafter = loaded
    options = {"temperature": 1.0, "max_new_tokens": 8}
    expected = foredraft.generate(model, "say 3", seed=3, **options)
    for seed in (np.int64(3), torch.tensor(3)):
        assert foredraft.generate(model, "say 3", seed=seed, **options).tokens == expected.tokens
        assert "".join(foredraft.stream(model, "say 3", seed=seed, **options)) == expected.text
    numbers = {"max_new_tokens": np.int32(6), "batch_size": np.int64(1), "seed": torch.tensor(3)}
    card = foredraft.score(model, drafter, ["say 3"], temperatures=[np.float64(0.0)], **numbers)
    json.dumps(dataclasses.asdict(card.conditions))
    assert card.conditions.seed == 3


BAD = {"seed": [1.5, True], "max_new_tokens": [0, -3], "batch_size": [0, 2.0]}
BAD |= {"temperatures": [[], [float("nan")]]}


@pytest.mark.parametrize("name", BAD)
def test_wrong_number_is_named(loaded, name):
    said = "temperature" if name == "temperatures" else f"^{name}="
    for value in BAD[name]:
        wrong = {name: value}
        with pytest.raises(UserError, match=said) as error:
            foredraft.score(*loaded, ["say 3"], **wrong)
        assert "context" not in str(error.value)
        if name in ("seed", "max_new_tokens"):
            with pytest.raises(UserError, match=said):
                foredraft.generate(loaded[0], "say 3", **wrong)
            with pytest.raises(UserError, match=said):
                next(foredraft.stream(loaded[0], "say 3", **wrong))


WRONG = {"stop": [5, b"a", [5], [None]], "plan": [3, Sampler()], "drafter": ["eagle", 3]}


@pytest.mark.parametrize("name", WRONG)
def test_argument_of_another_type_is_named(loaded, name):
    for value in WRONG[name]:
        with pytest.raises(UserError, match=f"^{name}: give (a|one) "):
            foredraft.generate(loaded[0], "say 3", **{name: value})


def test_public_names_are_listed_and_exist():
    assert dir(foredraft) == sorted(foredraft.__all__)
    assert set(foredraft._PLACES) == set(foredraft.__all__)
    assert all(getattr(foredraft, name).__name__ == name for name in dir(foredraft))


def test_sampling_is_asked_for_as_in_transformers(loaded):
    model, _ = loaded
    greedy, *drawn = (
        foredraft.generate(model, "say 3", max_new_tokens=8, **options).tokens
        for options in (
            {"do_sample": False},
            {"do_sample": True},
            {"temperature": 1.0},
            {"do_sample": True, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0},
        )
    )
    assert greedy == foredraft.generate(model, "say 3", max_new_tokens=8).tokens
    assert drawn[0] == drawn[1] == drawn[2] != greedy
    only = foredraft.generate(model, "say 3", max_new_tokens=8, do_sample=True, top_k=1)
    assert only.tokens == greedy
    for options, said in (
        ({"top_p": 0.9}, "top_p=0.9: greedy decoding draws nothing"),
        ({"temperature": 0.7, "do_sample": False}, "temperature=0.7: greedy"),
        ({"temperature": 0, "do_sample": True}, "leave one of them out"),
        ({"do_sample": "yes"}, "give True, False or None"),
        ({"temperature": "hot"}, "temperature='hot' is out of range"),
        ({"temperature": 1.0, "top_p": 0.0}, "top_p=0.0 is out of range"),
    ):
        with pytest.raises(UserError, match=said):
            foredraft.generate(model, "say 3", **options)


def test_model_of_transformers_is_taken_as_it_is(folders, loaded):
    model, drafter = loaded
    network = AutoModelForCausalLM.from_pretrained(folders / "target", dtype=torch.float32)
    network.generation_config.eos_token_id = None
    network.train()
    taken = foredraft.load_target(network)
    options = {"max_new_tokens": 12}
    for tokenizer in (None, taken.chat.tokenizer, str(folders / "target")):
        taken = foredraft.load_target(network, tokenizer=tokenizer)
        again = foredraft.generate(taken, "say 3", drafter, **options)
        assert again.tokens == foredraft.generate(model, "say 3", **options).tokens
    assert all(weight.requires_grad for weight in network.parameters())
    assert network.generation_config.eos_token_id is None
    assert foredraft.load_drafter(folders / "drafter", taken).taps == drafter.taps
    network.name_or_path = ""
    with pytest.raises(UserError, match=r"no tokenizer at ''; give tokenizer="):
        foredraft.load_target(network)
    for keywords in ({"dtype": "float32"}, {"device": "cpu"}):
        with pytest.raises(UserError, match=r"is for a name; change the model itself"):
            foredraft.load_target(network, tokenizer=taken.chat.tokenizer, **keywords)


def test_name_or_model_in_place_of_a_target_says_what_to_do(folders, loaded):
    model, drafter = loaded
    calls = [
        lambda target: foredraft.generate(target, "say 3"),
        lambda target: foredraft.stream(target, "say 3"),
        lambda target: foredraft.score(target, drafter, ["say 3"]),
        lambda target: foredraft.load_drafter(folders / "drafter", target),
    ]
    for call in calls:
        for wrong, said in (
            ("data/pocket", r"load it first: target = foredraft\.load_target\('data/pocket'\)"),
            (model.target.model, r"wrap it first: target = foredraft\.load_target\(model\)"),
            (None, "give what foredraft.load_target returns, not NoneType"),
        ):
            with pytest.raises(UserError, match=said) as caught:
                call(wrong)
            assert "\n" not in str(caught.value)
    for make in (
        lambda: foredraft.load_target(3),
        lambda: foredraft.load_target(str(folders / "target"), dtype=3),
        lambda: foredraft.load_target(str(folders / "target"), tokenizer=3),
        lambda: foredraft.load_drafter(None, model),
        lambda: foredraft.score(model, None, ["say 3"]),
        lambda: foredraft.score(model, drafter, ["say 3"], plans=[3]),
        lambda: foredraft.assist(3),
        lambda: foredraft.assist(drafter, plan="dinamic"),
        lambda: foredraft.save_drafter(None, "folder"),
        lambda: foredraft.train(target=model),
        lambda: foredraft.assist("/nope"),
        lambda: foredraft.train(drafter=drafter),
        lambda: foredraft.train(objective=lambda log_q, teacher: log_q),
        lambda: foredraft.train(objective={"name": "topk", "gama": 2}),
        lambda: foredraft.train(prompts=[]),
        lambda: foredraft.train(prompts=3),
        lambda: foredraft.train(3),
    ):
        with pytest.raises(UserError) as caught:
            make()
        assert "\n" not in str(caught.value)


def test_keywords_of_a_target_are_its_options(folders):
    target = foredraft.load_target(
        folders / "target", dtype=torch.float64, device="cpu", template="none"
    ).target
    assert (target.dtype, target.device.type) == (torch.float64, "cpu")
    with pytest.raises(UserError, match=r"target\.dtype=int3: choose auto"):
        foredraft.load_target(folders / "target", dtype="int3")


def test_plan_is_a_name_or_a_plan(loaded):
    model, drafter = loaded
    named, made, plain = (
        foredraft.generate(model, "say 3", drafter, plan=plan, max_new_tokens=8)
        for plan in ("chain", foredraft.Plan(2), foredraft.Plan())
    )
    assert named.tokens == made.tokens == plain.tokens
    assert plain.tau == 1
    card = foredraft.score(model, drafter, ["say 3"], plans=["chain"], max_new_tokens=6)
    assert card.headline.decode.startswith("chain")
    for wrong in ("auto", "dinamic"):
        with pytest.raises(UserError, match=f"plan: '{wrong}' is .* one of chain, drafts, dynamic, static$"):
            foredraft.generate(model, "say 3", drafter, plan=wrong)


def test_saved_drafter_is_loaded_again(loaded, tmp_path):
    model, drafter = loaded
    foredraft.save_drafter(drafter, tmp_path / "saved", model)
    again = foredraft.load_drafter(tmp_path / "saved", model)
    assert again.settings == drafter.settings
    card = (tmp_path / "saved" / "README.md").read_text()
    assert "foredraft.load_drafter(" in card
    assert "from_pretrained" not in card


def test_drafter_of_another_target_is_refused(folders, loaded, tmp_path):
    """Both have the same sizes, so nothing else would notice."""
    model, drafter = loaded
    state = AutoModelForCausalLM.from_pretrained(folders / "target", dtype=torch.float32)
    inputs = {"input_ids": torch.tensor([[1, 2, 3]]), "do_sample": False, "max_new_tokens": 2}
    assisted = foredraft.assist(drafter)
    state.generate(**inputs, custom_generate=assisted)
    with torch.no_grad():
        state.lm_head.weight.mul_(-1)
    state.generate(**inputs, custom_generate=assisted)  # a model that is being trained
    other = foredraft.load_target(state, tokenizer=model.chat.tokenizer)
    for call in (
        lambda: foredraft.generate(other, "say 3", drafter),
        lambda: foredraft.stream(other, "say 3", drafter),
        lambda: foredraft.score(other, drafter, ["say 3"]),
        lambda: foredraft.save_drafter(drafter, tmp_path / "saved", other),
        lambda: state.generate(**inputs, custom_generate=foredraft.assist(drafter)),
    ):
        with pytest.raises(UserError, match=r"made for target .*; load it for this target"):
            call()
    half = foredraft.load_target(str(folders / "target"), dtype="bfloat16")
    with pytest.raises(UserError, match=r"in torch\.float32, and the target on cpu in torch\.bfloat16"):
        foredraft.generate(half, "say 3", drafter)


def test_checkpoint_is_loaded_again_for_a_model_in_another_dtype(folders):
    model = AutoModelForCausalLM.from_pretrained(folders / "target", dtype=torch.float32)
    inputs = {"input_ids": torch.tensor([[1, 2, 3]]), "do_sample": False, "max_new_tokens": 2}
    assisted = foredraft.assist(str(folders / "drafter"))
    for dtype in (torch.float32, torch.bfloat16):
        assert model.to(dtype).generate(**inputs, custom_generate=assisted).shape == (1, 5)


def test_wrong_device_and_headless_model_are_named_in_one_line(folders):
    for device in ("cuda", "gpu"):
        if device != "cuda" or not torch.cuda.is_available():
            with pytest.raises(UserError, match=f"device={device}: not on this machine"):
                foredraft.load_target(str(folders / "target"), device=device)
    with pytest.raises(UserError, match="AutoModelForCausalLM"):
        foredraft.load_target(AutoModelForCausalLM.from_pretrained(folders / "target").model)


def test_training_in_a_notebook_is_the_command(folders, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    prompts = [f"say {i}" for i in range(40)]
    run = foredraft.train(
        *(
            option
            for option in QUICK
            if not option.startswith(("prompts.self", "trainer.max_steps", "rollout."))
        ),
        "prompts.heldout_share=0.2",
        drafter={"name": "eagle", "depth": 2},
        target=folders / "target",
        prompts=prompts,
        max_steps=6,
        output_dir=tmp_path / "out",
        rollout={"max_new_tokens": 8, "shard_size": 4, "samples": 1},
    )
    assert run.best
    assert all("\n" not in repr(one) and len(repr(one)) < 400 for one in (run, run.scorecard))
    assert f"tau {run.scorecard.headline.tau:.2f}" in repr(run.scorecard)
    assert run.folder.parent.parent == tmp_path / "out"
    assert run.scorecard == read_scorecard(run.best / "score.json")
    record = (run.folder / ".hydra" / "overrides.yaml").read_text()
    assert "rollout.max_new_tokens=8" in record
    assert "drafter.depth=2" in record
    target = foredraft.load_target(folders / "target")
    drafter = foredraft.load_drafter(run.best, target)
    answer = foredraft.generate(target, "say 3", drafter, max_new_tokens=4)
    assert str(answer.tokens) not in repr(answer)
    assert re.fullmatch(
        r"Model\(LlamaForCausalLM '.*', 0\.\d M parameters, torch\.float32, cpu\)", repr(target)
    )
    with pytest.raises(UserError, match=f"a run's folder, .*; give {run.folder}/checkpoints/best"):
        foredraft.load_drafter(run.folder, target)
    with pytest.raises(UserError, match="no such option"):
        foredraft.train(drafer="eagle", output_dir=tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_one_stop_string_is_not_read_as_its_letters(loaded):
    model, _ = loaded
    free = foredraft.generate(model, "say 3", max_new_tokens=40)
    pair = next(free.text[i : i + 2] for i in range(8, 30) if free.text.find(free.text[i : i + 2]) == i)
    one, listed, letters = (
        foredraft.generate(model, "say 3", max_new_tokens=40, stop=stop)
        for stop in (pair, [pair], list(pair))
    )
    assert one.tokens == listed.tokens
    assert one.text.endswith(pair)
    assert len(letters.tokens) < len(one.tokens), "the letters end it no earlier: choose others"


def test_threads_with_and_without_a_drafter_take_turns(loaded, monkeypatch):
    model, drafter = loaded
    prompts, plan = ["say 3", "count to ten"], Plan(2)
    options = {"max_new_tokens": 12, "plan": plan}
    expected = [foredraft.generate(model, prompt, max_new_tokens=12).tokens for prompt in prompts]
    tapped, inside, second = TextGenerator.tapped_target, threading.Event(), threading.Event()

    def paused(self):
        found = tapped(self)
        if self.drafter is None:
            second.set()  # the taps of the other thread are gone
        else:
            inside.set()
            second.wait(0.3)
        return found

    monkeypatch.setattr(TextGenerator, "tapped_target", paused)
    with ThreadPoolExecutor(2) as pool:
        one = pool.submit(foredraft.generate, model, prompts[0], drafter, **options)
        assert inside.wait(10)
        two = pool.submit(foredraft.generate, model, prompts[1], max_new_tokens=12)
        assert [one.result().tokens, two.result().tokens] == expected
