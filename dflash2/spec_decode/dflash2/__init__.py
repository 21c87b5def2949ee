# SPDX-License-Identifier: Apache-2.0
"""DFlash2 speculative decoding: the speculator."""
