"""DFlash2 is DFlash with other layers, but 0.27.1's constructors name their parts outright.

With the two class attributes a subclass swaps the layer or the model and inherits the rest.
"""

from _patchlib import Hunk, Marker, Patch

FILE = "vllm/model_executor/models/qwen3_dflash.py"

PATCH = Patch(
    name="subclass-seams",
    why="DFlash2 replaces the decoder layer and the model class of DFlash and inherits the rest",
    upstream="decoder_layer_cls and model_cls of vLLM 0.28.0",
    shipped_in="0.28.0",
    hunks=(
        Hunk(
            FILE,
            "DFlashQwen3Model",
            old="""\
    hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_substr={"midlayer.": "layers.0."},
""",
            new="""\
    decoder_layer_cls: type[nn.Module] = DFlashQwen3DecoderLayer

    hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_substr={"midlayer.": "layers.0."},
""",
        ),
        Hunk(
            FILE,
            "DFlashQwen3Model.__init__",
            old="                DFlashQwen3DecoderLayer(\n",
            new="                self.decoder_layer_cls(\n",
        ),
        Hunk(
            FILE,
            "DFlashQwen3ForCausalLM",
            old="""\
class DFlashQwen3ForCausalLM(Qwen3ForCausalLM):
""",
            new="""\
class DFlashQwen3ForCausalLM(Qwen3ForCausalLM):
    model_cls: type[nn.Module] = DFlashQwen3Model

""",
        ),
        Hunk(
            FILE,
            "DFlashQwen3ForCausalLM.__init__",
            old="        self.model = DFlashQwen3Model(\n",
            new="        self.model = self.model_cls(\n",
        ),
    ),
    defines=(
        (FILE, "DFlashQwen3Model.decoder_layer_cls"),
        (FILE, "DFlashQwen3ForCausalLM.model_cls"),
    ),
    shipped=(
        (
            Marker(FILE, "DFlashQwen3Model.__init__", "self.decoder_layer_cls("),
            Marker(FILE, "DFlashQwen3ForCausalLM.__init__", "self.model_cls("),
        ),
    ),
    core=True,
)
