# SPDX-License-Identifier: Apache-2.0
"""Beam: here its DFlash2 drafter only; vLLM 0.27.1 has no Beam target."""

from .nvidia.dflash2 import DFlash2BeamForCausalLM

__all__ = ["DFlash2BeamForCausalLM"]
