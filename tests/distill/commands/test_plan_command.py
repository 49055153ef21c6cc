"""foredraft plan: hours, memory and disk of a large run from those of a small one."""

import json
import shlex
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from workbench import CONF, Bench, foredraft

from distill.cli.main import rewrite
from distill.commands.planning.command import Job
from distill.commands.planning.from_run import plan_from_run
from distill.config.compose import compose
from distill.utils.phase_log import FILE, STARTING, PhaseLog, read_phases

PROMPTS, STEPS = 8, 4
PHASES = ("prompts", "rollouts", "taps", "training", "checkpoints")


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Path:
    bench = Bench(tmp_path_factory.mktemp("plan"))
    folder = bench.root / "run"
    sizes = [f"prompts.limit={PROMPTS}", "rollout.samples=2", f"trainer.max_steps={STEPS}", "score.every=2"]
    bench.train(*sizes, "prompts.self=0", "taps=memory", f"hydra.run.dir={folder}").succeeded()
    return folder


def changed(small: Path, folder: Path, old: str, new: str) -> Path:
    """The small run with another word in its configuration."""
    for name in ("checkpoints", FILE):
        (folder / name).symlink_to(small / name)
    (folder / ".hydra").mkdir()
    text = (small / ".hydra" / "config.yaml").read_text()
    assert old in text
    (folder / ".hydra" / "config.yaml").write_text(text.replace(old, new))
    return folder


def hours(run: Path, **job) -> dict[str, float]:
    same = {"prompts": PROMPTS, "samples": None, "steps": STEPS, "processes": 1, "faster": 1.0}
    return {
        p.name: p.hours for p in plan_from_run(run, Job(**(same | {"network": 10.0, "saves": 2} | job))).parts
    }


def test_run_writes_its_phases_and_takes_as_long_again(small):
    phases = {phase.name: phase for phase in read_phases(small)}
    assert set(phases) == set(PHASES)
    amounts = {name: phase.amounts for name, phase in phases.items()}
    assert amounts["rollouts"]["rows"] == 2 * PROMPTS
    assert amounts["rollouts"]["made"] == amounts["rollouts"]["answer_tokens"] > 0
    assert amounts["taps"]["tokens"] == amounts["rollouts"]["row_tokens"]
    assert amounts["training"]["steps"] == STEPS
    assert all(phase.seconds > 0 for phase in phases.values())
    again = hours(small)
    for name in ("rollouts", "taps", "training", "checkpoints"):
        measured = sum(phase.seconds for phase in read_phases(small) if phase.name == name) / 3600
        assert again[name] == pytest.approx(measured, rel=1e-9)


def test_hours_follow_work_processes_and_devices(small):
    one = hours(small)
    more = hours(small, prompts=10 * PROMPTS, steps=3 * STEPS, saves=8)
    assert [more[name] / one[name] for name in PHASES] == pytest.approx([10, 10, 10, 3, 4])
    assert hours(small, samples=4)["rollouts"] == pytest.approx(2 * one["rollouts"])
    assert hours(small, steps=None)["training"] == pytest.approx(hours(small, steps=800)["training"])
    eight = hours(small, processes=8, faster=2.0)
    assert [one[name] / eight[name] for name in PHASES] == pytest.approx([1, 16, 2, 2, 2])
    assert one["gradients"] == 0 < eight["gradients"]
    assert hours(small, processes=8, network=20.0)["gradients"] == pytest.approx(eight["gradients"] / 2)


def test_hidden_states_that_do_not_fit_are_read_in_every_step(small, tmp_path):
    phases = read_phases(small)
    (taps,) = (phase for phase in phases if phase.name == "taps")
    tokens = sum(phase.amounts["tokens"] for phase in phases if phase.name == "training")
    one, reading = hours(small), taps.seconds / taps.amounts["tokens"] / 3600
    for kept in (0.5, 0.25):
        limit = kept * taps.amounts["bytes"] / 2**30
        (tmp_path / str(kept)).mkdir()
        tight = changed(small, tmp_path / str(kept), "taps_gb: ", f"taps_gb: {limit!r}  # ")
        other = hours(tight)
        assert other["taps"] == pytest.approx(kept * one["taps"])
        assert other["training"] - one["training"] == pytest.approx((1 - kept) * tokens * reading)
        # A run that kept as much is extrapolated to itself.
        part = {name: kept * taps.amounts[name] for name in ("tokens", "bytes")} | {"share": kept}
        own = replace(taps, seconds=kept * taps.seconds, amounts=part)
        (tight / FILE).unlink()  # a link
        rows = [asdict(own if phase is taps else phase) for phase in phases]
        (tight / FILE).write_text(json.dumps({"phases": rows}))
        assert hours(tight) == pytest.approx(one | {"taps": kept * one["taps"]})


def test_taps_on_disk_are_shared_and_count_as_disk(small, tmp_path):
    disk = changed(small, tmp_path, "taps: memory", "taps: cache")
    assert hours(disk, processes=4)["taps"] == pytest.approx(hours(small)["taps"] / 4)
    job = Job(1000, None, None, 1, 1.0, 10.0, None)
    held, kept = plan_from_run(small, job), plan_from_run(disk, job)
    assert held.memory["taps"] == kept.disk["taps"] > 0
    assert "taps" not in held.disk
    assert "taps" not in kept.memory


def test_command_prints_and_writes_the_plan(small, tmp_path):
    out = tmp_path / "plan.json"
    done = foredraft("plan", str(small), "prompts=1000000", "--gpus", "64", f"out={out}")
    assert "1,000,000 prompts" in done.succeeded().out
    card = json.loads(out.read_text())
    assert card["hours"] == pytest.approx(sum(part["hours"] for part in card["parts"]))
    foredraft("plan", f"run={small}", "prompts=5", "out=/nowhere/plan.json").refused("cannot be written")
    for words, text in {
        "prompts=0": "give 1 or more",
        "prompts=5 faster=0": "more than 0",
        "prompts=5 gpus=0": "1 or more",
        "prompts=5 drafter=eagle": "takes it from that run",
        "prompts=5 gpu=8": "write gpus=8",
        "--prompts 5": "write prompts=",
        "--processes=8 prompts=5": "write gpus=8",
        "gpus=2": "as in prompts=100000",
    }.items():
        foredraft("plan", str(small), *words.split()).refused(text)


def test_plan_from_a_downloaded_run_prints_no_control_characters(small, tmp_path):
    """Its target's name, and the options that the printed command takes from its record."""
    run = changed(small, tmp_path, "max_steps: 4", "max_steps: 4")
    config = (run / ".hydra" / "config.yaml").read_text()
    path = next(line for line in config.splitlines() if line.strip().startswith("path:"))
    config = config.replace(path, '  path: "a\\e[2Jb"')
    (run / ".hydra" / "config.yaml").write_text(config)
    (run / ".hydra" / "overrides.yaml").write_text('- "target=a\\e[2Jb"\n- "logger=\\u202ecsv"\n')
    out = foredraft("plan", str(run), "prompts=1000").succeeded().out
    assert "target=" in out
    assert out.replace("\n", "").isprintable()


def test_start_of_an_engine_is_no_time_of_answers(small, tmp_path):
    """Two starts of the run waited for vLLM; a large run waits once."""
    other = changed(small, tmp_path, "taps: memory", "taps: online")
    phases = [asdict(phase) for phase in read_phases(small) if phase.name != "taps"]
    (rollouts,) = (phase for phase in phases if phase["name"] == "rollouts")
    seconds, made = rollouts["seconds"], rollouts["amounts"]["made"]
    for phase, start in ((rollouts, 90.0), (rollouts | {"amounts": rollouts["amounts"] | {"made": 0}}, 70.0)):
        phase["amounts"] = phase["amounts"] | {STARTING: start}
        phase["seconds"] = start + seconds / 2
        phases += [phase] * (phase is not rollouts)
    (other / FILE).unlink()  # a link
    (other / FILE).write_text(json.dumps({"phases": phases}))
    took = hours(other)
    assert took["rollouts"] == pytest.approx(hours(small)["rollouts"])
    assert took["engine"] == pytest.approx(70 / 3600)
    assert made
    said = foredraft("plan", str(other), "prompts=1000", "gpus=4").succeeded().out
    for part in (
        "taps=online",
        "10 GB/s is assumed",
        "tau to expect: the small run has tau",
        "for: drafter=",
    ):
        assert part in said
    command = shlex.split(said.splitlines()[-1])
    assert command[:2] == ["foredraft", "train"]
    cfg = compose(rewrite(command[2:], CONF), CONF)
    assert (cfg.prompts.limit, cfg.trainer.devices, cfg.trainer.max_steps) == (1000, 4, None)
    assert cfg.drafter.depth == 2


def test_run_that_wrote_its_own_prompts_has_a_plan(small, tmp_path):
    """Such a run logs no phase of prompts, as experiment=quick."""
    own = changed(small, tmp_path, "self: 0", f"self: {2 * PROMPTS}")
    phases = [asdict(phase) for phase in read_phases(small) if phase.name != "prompts"]
    (own / FILE).unlink()  # a link
    (own / FILE).write_text(json.dumps({"phases": phases}))
    one, more = hours(own, prompts=2 * PROMPTS), hours(own, prompts=20 * PROMPTS)
    assert one["rollouts"] == pytest.approx(hours(small)["rollouts"])
    assert more["rollouts"] == pytest.approx(10 * one["rollouts"])
    assert "wrote its own prompts" in foredraft("plan", str(own), "prompts=5").succeeded().out


def test_run_that_has_not_ended_is_one_line(tmp_path):
    assert "train a small one first" in foredraft("plan", str(tmp_path), "prompts=5").err
    log = PhaseLog(tmp_path)
    with pytest.raises(ZeroDivisionError), log.time("rollouts") as part:
        part["rows"] = 1 / 0
    with log.time("taps"):
        pass
    assert read_phases(tmp_path) == []
    (tmp_path / FILE).write_text("{")
    assert "remove it" in foredraft("plan", str(tmp_path), "prompts=5").err
