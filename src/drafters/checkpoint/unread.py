"""Drafters of other programs that have no class here: what they are, and what reads them.

Names of architectures are those of vLLM 0.33 (`models/registry.py`), SGLang 0.5.23 (`EntryClass` of its
models) and speculators 0.9.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from drafters.export import formats
from drafters.export.llama_config import architecture


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


VLLM, SGLANG, SPECULATORS = "vLLM 0.33", "SGLang 0.5.23", "speculators 0.9"
# Architectures that are read here though a pattern of `KINDS` fits.
READ = (
    "DFlashDraftModel",
    "DSparkDraftModel",
    "Qwen3DSparkModel",
    "EagleLlamaForCausalLM",
    "LlamaForCausalLMEagle",
    "Qwen2ForCausalLMEagle",
)
# Pattern of an architecture's name -> what it is; the first that fits counts.
KINDS: Mapping[str, str] = {
    r"DFlash2": "DFlash 2",
    r"XPress": "XPress",
    r"LiLiCorr": "LiLiCorr",
    r"DSpark": "a DSpark with another model's layers",
    r"DFlash|MuseGlimmer": "a DFlash with another model's layers",
    r"^Eagle3Deepseek": "an EAGLE-3 with latent attention",
    r"^Eagle(?!3)|ForCausalLMEagle$": "an EAGLE with another model's layers",
    r"MTP|NextN|Assistant": "an MTP head outside its target's files",
    r"^ExtractHiddenStates": "an exporter of hidden states",
}
# Program -> architectures that it has and that are not read here.
KNOWN: Mapping[str, frozenset[str]] = {
    VLLM: _words(
        """
        BailingMoeV25MTPModel BailingMoeV3MTPModel DFlash2BeamDraftModel DFlash2DraftModel
        DFlashLagunaForCausalLM DFlashMuseGlimmerAssistantModel DFlashQwen3XPressModel
        DSparkV41DraftModel DeepSeekMTPModel DeepSeekV4MTPModel DeepseekV32MTPModel Dots3NoteMTPModel
        Eagle3DeepseekV2ForCausalLM Eagle3DeepseekV3ForCausalLM EagleCohereForCausalLM
        EagleDeepSeekMTPModel EagleLlama4ForCausalLM EagleMiniCPMForCausalLM EagleMistralForCausalLM
        EagleMistralLarge3ForCausalLM ErnieMTPModel Exaone4_5_MTP ExaoneMoeMTP ExtractHiddenStatesModel
        Gemma4DSparkModel Gemma4MTPModel Glm4MoeLiteMTPModel Glm4MoeMTPModel Glm5NextMTPModel
        GlmOcrMTPModel HYV3MTPModel HYV4MTPModel InklingMTPModel InternS2MobiusMTP K3DSparkModel
        KimiK3MTPModel LiLiCorrDraftModel LongCatFlashMTPModel MiMoMTPModel MiMoV2MTPModel
        MiMoV2OmniMTPModel MiniMaxM3MTP MuseGlimmerAssistantModel MuseSparkDSparkModel NemotronHMTPModel
        OpenPanguMTPModel ParseAuxMTPModel Qwen3NextMTP Qwen3OmniDSparkModel Qwen3XPressModel Qwen3_5MTP
        Qwen3_5MoeMTP Qwen4ExpMTP Step3p5MTP Step5MTP
        """
    ),
    SGLANG: _words(
        """
        BailingMoeForCausalLMNextN DFlash2BeamDraftModel DFlash2DraftModel DFlashLagunaForCausalLM
        DSparkMiniMaxDraftModel DeepseekV3ForCausalLMNextN DeepseekV4ForCausalLMDSpark
        DeepseekV4ForCausalLMNextN Dots3NoteForCausalLMNextN Eagle3DeepseekV2ForCausalLM
        Ernie4_5_MoeForCausalLMMTP ExaoneMoEForCausalLMMTP Gemma4AssistantForCausalLM
        Gemma4UnifiedAssistantForCausalLM GigaChat35ForCausalLMNextN Glm4MoeForCausalLMNextN
        Glm4MoeLiteForCausalLMNextN Glm5NextForConditionalGenerationNextN GlmMoeDsaForCausalLMNextN
        GlmOcrForConditionalGenerationNextN HYV3ForCausalLMNextN HYV4ForCausalLMNextN IQuestQ1MTP
        InklingForConditionalGenerationMTP Lfm2DSparkDraftModel LiLiCorrDraftModel LingDSparkModel
        LongcatFlashForCausalLMNextN MiMoMTP MiMoV2MTP MiniMaxDFlash2DraftModel MistralForCausalLMEagle
        MistralLarge3ForCausalLMEagle MuseGlimmerAssistantModel NemotronHForCausalLMMTP
        Qwen3MoeForCausalLMMTP Qwen3NextForCausalLMMTP Qwen3_5ForCausalLMMTP Qwen4ExpForCausalLMMTP
        Step3p5MTP
        """
    ),
}
# `speculators_model_type` -> what it is, and the programs that read it.
OF_SPECULATORS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "dflash2": ("DFlash 2", (SPECULATORS, VLLM)),
    "xpress": ("XPress", (SPECULATORS,)),
}


def refusal(config: Mapping[str, Any]) -> str:
    """Why another program's drafter is not read here, and what reads it; "" if it is read or unknown.

    Args:
        config: content of a `config.json`.
    """
    if kind := config.get("speculators_model_type"):
        found = OF_SPECULATORS.get(kind) if isinstance(kind, str) else None
        return _line(f"speculators_model_type {kind!r}", *found) if found else ""
    name = architecture(config)
    what = next((what for pattern, what in KINDS.items() if re.search(pattern, name)), "")
    if not what or name in READ:
        return ""
    if "MTP" in what and formats.find_reader(config):  # its files have a target's configuration
        return ""
    return _line(name, what, [program for program, names in KNOWN.items() if name in names])


def _line(name: str, what: str, programs: Sequence[str]) -> str:
    readers = " and ".join(programs) or "the program that wrote it"
    return f"{name} is {what}, which has no drafter here; {readers} can read it"
