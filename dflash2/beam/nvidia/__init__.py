# SPDX-License-Identifier: Apache-2.0
"""Beam's models for NVIDIA GPUs."""
