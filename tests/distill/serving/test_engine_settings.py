"""What vLLM is told about draft lengths, from forecasts of several batch sizes."""

import json

from distill.serving.engine_settings import ServedChain, lines, schedule, speculative_config


def test_a_schedule_begins_at_1_and_has_no_gap():
    chains = [ServedChain(32, 0), ServedChain(1, 4), ServedChain(8, 2), ServedChain(4, 4)]
    assert schedule(chains) == [[1, 4, 4], [5, 8, 2], [9, 32, 0]]


def test_one_length_needs_no_schedule():
    assert speculative_config([ServedChain(1, 3), ServedChain(8, 3)]) == {"num_speculative_tokens": 3}
    assert speculative_config([ServedChain(1, 0), ServedChain(8, 0)]) == {}
    (line,) = lines("eagle", 0.0, [ServedChain(1, 0)])
    assert "without --speculative-config" in line


def test_drawn_drafts_are_verified_as_a_block():
    config = speculative_config([ServedChain(1, 3, drawn=True), ServedChain(8, 1)])
    assert config["draft_sample_method"] == "probabilistic"
    assert config["rejection_sample_method"] == "block"
    assert config["num_speculative_tokens_per_batch_size"] == [[1, 1, 3], [2, 8, 1]]


def test_the_rates_are_those_of_the_longest_draft():
    chains = [ServedChain(1, 2, False, (0.61239, 0.3)), ServedChain(8, 1, False, (0.6,))]
    said = json.loads(list(lines("eagle", 0.0, chains))[1].partition("are: ")[2])
    assert said["synthetic_acceptance_rates"] == [0.6124, 0.3]
    assert (said["num_speculative_tokens"], said["rejection_sample_method"]) == (2, "synthetic")
