"""DFlash2 in plain float32 PyTorch: what every faster implementation in this repository is held against.

Slow on purpose: one request at a time, no KV cache, no kernel. Where something else disagrees with
this file, one of the two has a bug. Symbols: n tokens, H hidden size, S drafted tokens, K candidates,
r selector rank.

    python tests/support/reference.py FOLDER          greedy acceptance on FOLDER's prompts
    python tests/support/reference.py FOLDER --check  and compare the text with FOLDER/reference.json
"""

import argparse
import itertools
import json
import math
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from safetensors.torch import load_file

DEFAULTS = {"layer_types": None, "sliding_window": None, "is_causal": None}


def load(folder):
    """A checkpoint folder: config.json's keys as attributes, and `weights`, all float32."""
    config = DEFAULTS | json.loads((Path(folder) / "config.json").read_text())
    weights = {name: w.float() for name, w in load_file(Path(folder) / "model.safetensors").items()}
    return SimpleNamespace(weights=weights, **config)


def rms_norm(x, weight, eps):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def rope(x, positions, theta):
    """Rotates x [n, heads, head_dim], pairing channel i with i + head_dim / 2 ("neox style")."""
    half = x.shape[-1] // 2
    angle = positions[:, None].float() * theta ** (-torch.arange(half).float() / half)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    first, second = x.split(half, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def attention(q, k, v, visible):
    """q [n, heads, d], k and v [m, kv heads, d], visible [n, m] bool -> [n, heads * d]."""
    repeats = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    scores = torch.einsum("nhd,mhd->hnm", q, k) / math.sqrt(q.shape[-1])
    weights = scores.masked_fill(~visible, -math.inf).softmax(-1)
    return torch.einsum("hnm,mhd->nhd", weights, v).flatten(1)


def queries(m, p, x, positions):
    return normed_heads(m, p + "self_attn.q_proj", p + "self_attn.q_norm", x, m.num_attention_heads, positions)


def keys(m, p, x, positions):
    return normed_heads(m, p + "self_attn.k_proj", p + "self_attn.k_norm", x, m.num_key_value_heads, positions)


def normed_heads(m, projection, norm, x, heads, positions):
    y = (x @ m.weights[projection + ".weight"].T).unflatten(-1, (heads, m.head_dim))
    return rope(rms_norm(y, m.weights[norm + ".weight"], m.rms_norm_eps), positions, m.rope_theta)


def values(m, p, x):
    return (x @ m.weights[p + "self_attn.v_proj.weight"].T).unflatten(-1, (m.num_key_value_heads, m.head_dim))


def mlp(m, p, x):
    w = m.weights
    gate, up = x @ w[p + "mlp.gate_proj.weight"].T, x @ w[p + "mlp.up_proj.weight"].T
    return (F.silu(gate) * up) @ w[p + "mlp.down_proj.weight"].T


# The target: an ordinary causal Qwen3.


def target_forward(t, ids, capture):
    """Logits [n, vocabulary] after token ids [n], and the context [n, len(capture) * H_target].

    `capture` numbers decoder layers from 0; a layer's state is its output with the residual added.
    """
    w, positions = t.weights, torch.arange(len(ids))
    causal = positions[:, None] >= positions
    x, states = w["model.embed_tokens.weight"][ids], []
    for i in range(t.num_hidden_layers):
        p = f"model.layers.{i}."
        h = rms_norm(x, w[p + "input_layernorm.weight"], t.rms_norm_eps)
        y = attention(queries(t, p, h, positions), keys(t, p, h, positions), values(t, p, h), causal)
        x = x + y @ w[p + "self_attn.o_proj.weight"].T
        x = x + mlp(t, p, rms_norm(x, w[p + "post_attention_layernorm.weight"], t.rms_norm_eps))
        if i in capture:
            states.append(x)
    x = rms_norm(x, w["model.norm.weight"], t.rms_norm_eps)
    return x @ w["lm_head.weight"].T, torch.cat(states, -1)


# The drafter.


def grouped_conv(x, delta, base, group_size):
    """out[i, c] = sum over taps t of (base[t, c] + delta[i, t, c // group_size]) * x[i - t, c].

    x [block, H], delta [block, taps, H / group_size], base [taps, H]. Before the block there is
    nothing: x is zero there, and no block sees another.
    """
    out = torch.zeros_like(x)
    for t in range(len(base)):
        earlier = F.pad(x, (0, 0, t, 0))[: len(x)]
        out += (base[t] + delta[:, t].repeat_interleave(group_size, -1)) * earlier
    return out


def conv_pair(d, name, normed):
    """The two halves of one convolution: what filters a sublayer's input, and what its output.

    Both get their kernels from the sublayer's normed input [block, H], with one projection.
    """
    cfg = d.dflash_config
    delta = normed @ d.weights[name + ".kernel_projection.weight"].T
    delta = delta.unflatten(-1, (2, cfg["conv_kernel_size"], -1))
    base = d.weights[name + ".base_kernel"]
    return [lambda x, s=side: grouped_conv(x, delta[:, s], base[s], cfg["conv_group_size"]) for side in (0, 1)]


def visible_to_block(d, layer, block_positions, all_positions):
    """Which positions a layer's block rows attend to, [block, context + block] bool."""
    distance = block_positions[:, None] - all_positions
    sliding = d.layer_types is not None and d.layer_types[layer] == "sliding_attention"
    causal = d.is_causal
    if causal is None:
        causal = d.dflash_config.get("causal", sliding)
    near = distance.abs() < d.sliding_window if sliding else torch.ones_like(distance, dtype=torch.bool)
    return near & (distance >= 0) if causal else near


def draft_hidden(d, t, block_ids, first_position, context):
    """Final-normed states [block, H].

    block_ids  [block]: the anchor, at first_position, then mask tokens
    context    [first_position, layers * H_target]: the target's states of every earlier position
    """
    w, cfg = d.weights, d.dflash_config
    near, far = first_position + torch.arange(len(block_ids)), torch.arange(first_position)
    everything = torch.cat([far, near])
    x = t.weights["model.embed_tokens.weight"][block_ids] * cfg.get("input_embedding_scale", 1.0)
    context = rms_norm(context @ w["fc.weight"].T, w["hidden_norm.weight"], d.rms_norm_eps)
    for i in range(d.num_hidden_layers):
        p = f"layers.{i}."
        h = rms_norm(x, w[p + "input_layernorm.weight"], d.rms_norm_eps)
        before, after = conv_pair(d, p + "attention_conv", h)
        h = before(h)
        seen = torch.cat([context, h])  # the context is not convolved
        visible = visible_to_block(d, i, near, everything)
        y = attention(queries(d, p, h, near), keys(d, p, seen, everything), values(d, p, seen), visible)
        x = x + after(y @ w[p + "self_attn.o_proj.weight"].T)
        h = rms_norm(x, w[p + "post_attention_layernorm.weight"], d.rms_norm_eps)
        before, after = conv_pair(d, p + "mlp_conv", h)
        x = x + after(mlp(d, p, before(h)))
    return rms_norm(x, w["norm.weight"], d.rms_norm_eps)


def draft_logits(d, t, hidden):
    """The target head's logits of draft states, scaled first and then capped."""
    cfg = d.dflash_config
    logits = hidden @ t.weights["lm_head.weight"].T * cfg.get("output_multiplier", 1.0)
    cap = cfg.get("final_logit_softcapping") or 0.0
    return cap * torch.tanh(logits / cap) if cap > 0 else logits


def candidates(d, t, hidden):
    """Token ids and unary scores of the K best continuations of each row, both [rows, K]."""
    best = draft_logits(d, t, hidden).topk(d.dflash_config["selector_top_k"], -1)
    return best.indices, best.values


def edge_scores(d, hidden, ids, unary, predecessor):
    """Scores [K] of one step's candidates after the token `predecessor`; hidden [H]."""
    w = d.weights
    projected = w["candidate_selector.hidden_projection.weight"] @ hidden
    gate = w["candidate_selector.predecessor_codebook"][predecessor] * projected
    return unary + w["candidate_selector.successor_codebook"][ids] @ gate


def draft_block(d, t, anchor, first_position, context, steps, temperature=0.0, generator=None, path=None):
    """One draft: tokens [S], candidate ids [S, K], unary scores [S, K] and path scores [S, K].

    At temperature 0 the best candidate is taken at each step, otherwise one is drawn from
    softmax(scores / temperature); every other token has probability 0. A `path` is walked as given.
    """
    block = torch.tensor([anchor] + [d.dflash_config["mask_token_id"]] * steps)
    hidden = draft_hidden(d, t, block, first_position, context)[1:]
    ids, unary = candidates(d, t, hidden)
    tokens, scores, previous = [], torch.empty_like(unary), anchor
    for step in range(steps):
        scores[step] = edge_scores(d, hidden[step], ids[step], unary[step], previous)
        if path is not None:
            previous = path[step]
        elif temperature == 0:
            previous = int(ids[step, scores[step].argmax()])
        else:
            q = (scores[step] / temperature).softmax(-1)
            previous = int(ids[step, torch.multinomial(q, 1, generator=generator)])
        tokens.append(previous)
    return tokens, ids, unary, scores


def greedy_decode(d, t, prompt, new_tokens, steps):
    """Greedy decoding with drafts. Returns the new tokens, and how many of each draft were accepted."""
    capture = d.dflash_config["target_layer_ids"]
    ids, accepted = list(prompt), []
    logits, context = target_forward(t, torch.tensor(ids), capture)
    anchor = int(logits[-1].argmax())
    while len(ids) - len(prompt) < new_tokens:
        start = len(ids)
        draft = draft_block(d, t, anchor, start, context, steps)[0]
        logits, context = target_forward(t, torch.tensor([*ids, anchor, *draft]), capture)
        verdict = logits[start:].argmax(-1).tolist()
        right = 0
        while right < steps and draft[right] == verdict[right]:
            right += 1
        ids += [anchor, *draft[:right]]
        anchor, context = verdict[right], context[: len(ids)]
        accepted.append(right)
    return ids[len(prompt) : len(prompt) + new_tokens], accepted


def verified(accepted, new_tokens):
    """The drafts of `greedy_decode` that an engine counts: it stops once it has the tokens asked for.

    Its first token comes from the prompt alone, so that it is one ahead of the drafts.
    """
    ends = itertools.accumulate((n + 1 for n in accepted), initial=1)
    return [n for n, have in zip(accepted, ends) if have < new_tokens]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--check", action="store_true", help="compare the text with reference.json")
    args = parser.parse_args()
    torch.set_grad_enabled(False)
    t, d = load(args.folder / "target"), load(args.folder / "draft")
    source = json.loads((args.folder / "prompts.json").read_text())
    runs = [greedy_decode(d, t, p, source["new_tokens"], source["num_speculative_tokens"]) for p in source["prompts"]]
    counts = [n for _, accepted in runs for n in accepted]
    print(f"{len(counts)} drafts, acceptance length {1 + sum(counts) / len(counts):.4f}")
    if args.check:
        wanted = json.loads((args.folder / "reference.json").read_text())["greedy_tokens"]
        different = [i for i, (tokens, _) in enumerate(runs) if tokens != wanted[i]]
        print(f"text differs for prompts {different}" if different else "text as in reference.json")
        return 1 if different else 0
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
