"""Constants of a plan before any run, each with its source.

What was measured on this project's machines is called measured; the rest are data sheets and public figures.
"""

from __future__ import annotations

from typing import NamedTuple

GIB = 2**30

# -- efficiencies: share of a card's peak ---------------------------------------------------------

# Reading weights and keys in decoding. Llama-3.1-8B in vLLM, H100, one request: 133 tokens a second
# (vllm-project/vllm#16937), which reads 16.1 GB for each of them.
READING = 0.64
# Products of many rows without gradients. Llama-3-8B in vLLM, RTX A6000, 128 tokens in and out: 4,326 tokens
# a second (vllm-project/vllm#4702).
FORWARD = 0.45
# Products of a drafter's training step. Qwen3-8B, EAGLE-3, 3 depths at all places, 5,000 texts of ShareGPT, 5
# passes: 942 s on two H100, and two more that ran vLLM (vllm-project/speculators,
# examples/train/eagle3_qwen3_8b_sharegpt_online_5k.sh): 7.5 GFLOP for each of 26 million tokens.
TRAINING = 0.10
TEXT_TOKENS = 1024  # of a conversation: speculators' tutorials count 1.6 TB for 50,000 of them
ENGINE_SEQUENCES = 256  # answers at once in vLLM, its `max_num_seqs`, memory permitting
ENGINE_MEMORY = 0.9  # share of a card that vLLM uses, its `gpu_memory_utilization`
ENGINE_START = 74.0  # seconds: vLLM with Qwen3-8B, H100, the same example of speculators
PROMPT_TOKENS = 217  # of a question of ShareGPT, mean of 1,000 (vllm-project/vllm#17788)

# -- cards: dense bf16 products, from the makers' data sheets ------------------------------------


class Card(NamedTuple):
    """One device.

    Attributes:
        name: as a user knows it.
        memory: bytes.
        bandwidth: of the memory, bytes a second.
        flops: dense products in bf16, a second.
        link: between the cards of one machine, bytes a second in one direction.
        layer_seconds: time of a layer in a pass that computes next to nothing: launches of its kernels.
        depth_seconds: the same for one depth in a training step, with stored hidden states.
        reading, decoding, forward, training: shares of `bandwidth` and `flops` that are reached.
    """

    name: str
    memory: float
    bandwidth: float
    flops: float
    link: float
    layer_seconds: float = 0.48e-3  # measured: SmolLM2-135M, 30 layers, 14.3 ms a pass, H100 and H200
    depth_seconds: float = 0.024  # measured: EAGLE, depth 2, bundled target and SmolLM2, 46 to 50 ms a step
    reading: float = READING
    decoding: float = FORWARD
    forward: float = FORWARD
    training: float = TRAINING


NVLINK4, NVLINK3, PCIE4 = 450e9, 300e9, 25e9
CARDS = {
    "h100": Card("NVIDIA H100 80 GB", 80e9, 3.35e12, 989e12, NVLINK4),
    "h200": Card("NVIDIA H200 141 GB", 141e9, 4.8e12, 989e12, NVLINK4),
    "b200": Card("NVIDIA B200 180 GB", 180e9, 8.0e12, 2250e12, 900e9),
    "a100": Card("NVIDIA A100 80 GB", 80e9, 2.04e12, 312e12, NVLINK3),
    "a100_40": Card("NVIDIA A100 40 GB", 40e9, 1.56e12, 312e12, NVLINK3),
    "l40s": Card("NVIDIA L40S 48 GB", 48e9, 0.864e12, 362e12, PCIE4),
    "a6000": Card("NVIDIA RTX A6000 48 GB", 48e9, 0.768e12, 155e12, PCIE4),
    "rtx4090": Card("NVIDIA RTX 4090 24 GB", 24e9, 1.008e12, 165e12, PCIE4),
}
DEFAULT_CARD = "h100"


GPUS_OF_MACHINE = 8  # cards in one machine; more are several machines
NETWORK = 10e9  # bytes a second between machines, as `network=` has it
CPU_LAYER_SECONDS = 1.2e-3  # measured: bundled target, 12 layers, 69.9 tokens a second beside other programs
CPU_DEPTH_SECONDS = 0.0  # a CPU computes while it prepares the next operation
# Shares of a large product's speed in small models. Measured: experiment=quick, one thread of an EPYC among
# other programs. Sampling and attention take most of a step of decoding.
CPU_DECODING, CPU_FORWARD, CPU_TRAINING = 0.09, 0.27, 0.33


def known_card(hardware: str) -> Card | None:
    """The card of this name, as its driver calls it; None: no known one."""
    words = hardware.lower().replace(" ", "")
    by_length = sorted(CARDS, key=len, reverse=True)
    return next((CARDS[key] for key in by_length if key.partition("_")[0] in words), None)


# -- memory and disk ------------------------------------------------------------------------------

TRAINED_BYTES = 16  # of a trained weight: itself, its gradient and two moments, in fp32
LAYER_ACTIVATIONS = 34  # bytes of a layer for each token and hidden size (arXiv:2205.05198, section 4.1)
RESERVED = 2.0 * GIB  # CUDA context, workspaces and fragments of a process: an assumption
PROMPT_SECONDS = 1.0e-3  # CPU time to read, check and count one prompt: measured (benchmark.py scale)
PROMPT_BYTES = 700  # memory of one prompt in a process: measured (benchmark.py scale)
ROLLOUT_BYTES = 8  # of a token: 3 in a shard, 5 in the memory-mapped copy
DISK_SPEED = 2e9  # bytes a second of a machine's disk, written and read: an assumption
# Scoring a save point: 28 s on an H200 for SmolLM2-135M (docs/scale.md), where a pass of the target takes
# 14.3 ms. It decodes one token after another, so it is counted in passes.
SCORE_PASSES = 28.0 / 14.3e-3

# -- tau ------------------------------------------------------------------------------------------


class Anchor(NamedTuple):
    """A public figure of EAGLE-3: acceptance length after training on so many answers."""

    prompts: int
    low: float
    high: float
    source: str


# Chains of 3 tokens, vLLM, except SpecForge's, which is SGLang's.
EAGLE3 = (
    Anchor(5_000, 1.45, 1.45, "Qwen3-8B, 5,000 texts: speculators#751"),
    Anchor(50_000, 1.94, 1.94, "Qwen2.5-7B, 50,000 texts: SpecForge#128"),
    Anchor(500_000, 2.35, 2.95, "about 500,000 texts, chains of 3: speculators#563"),
)
LEAST_WEIGHTS = 1_000_000_000  # of a target that these figures may hold for: an assumption
# Published EAGLE-3 drafters of a target: acceptance length, conditions and source
VLLM_TEST = "chain of 3, MT-Bench, T=0: vLLM's test_acceptance_length.py"
PUBLISHED = {
    "huggingfacetb/smollm2-135m-instruct": (
        "measured: 2.49 after 2,986 answers, most of gsm8k (chain of 3, T=0, scripts/lab/results/h200)"
    ),
    "qwen/qwen3-8b": f"RedHatAI's EAGLE-3 has 2.26 ({VLLM_TEST})",
    "meta-llama/llama-3.1-8b-instruct": f"RedHatAI's EAGLE-3 has 2.60 ({VLLM_TEST})",
    "meta-llama/llama-3.3-70b-instruct": (
        "EAGLE-3 drafters of RedHatAI and Nebius have 2.88 and 3.89 (chain of 7, MT-Bench, T=1: the card of "
        "nebius/EAGLE3-Llama-3.3-70B-Instruct)"
    ),
}
