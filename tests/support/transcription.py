"""NumPy transcriptions of the kernels that decide which token is emitted: noise, walk, verification.

They exist because the interpreter takes a tenth of a second a request and a chi-square test needs a
hundred thousand of them. test_lossless.py holds them to the kernels, token by token. Noise is exact:
Philox-4x32-10 (Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, 2011) as in tl.randint.
"""

import numpy as np

LOW = np.uint64(0xFFFFFFFF)
HALF = np.uint64(32)
RAND_MIN = np.float32(4.6566127342e-10)
DRAFT_NOISE_OFFSET = 2**30


def philox(seed, offset):
    """First word of tl.randint4x(seed, offset): uint32, in the broadcast shape of two int arrays."""
    seed, offset = np.broadcast_arrays(np.asarray(seed).astype(np.uint64), np.asarray(offset).astype(np.uint64))
    c0, c1 = offset & LOW, offset >> HALF
    c2 = c3 = np.zeros_like(c0)
    k0, k1 = seed & LOW, seed >> HALF
    for _ in range(10):
        a, b = np.uint64(0xD2511F53) * c0, np.uint64(0xCD9E8D57) * c2
        c0, c1, c2, c3 = (b >> HALF) ^ c1 ^ k0, b & LOW, (a >> HALF) ^ c3 ^ k1, a & LOW
        k0, k1 = (k0 + np.uint64(0x9E3779B9)) & LOW, (k1 + np.uint64(0xBB67AE85)) & LOW
    return c0.astype(np.uint32)


def uniform(seed, offset):
    """tl_rand32(includes_zero=False): float32 in (0, 1)."""
    word = philox(seed, offset).view(np.int32)
    return np.maximum(np.where(word < 0, -word - 1, word).astype(np.float32) * np.float32(4.6566127342e-10), RAND_MIN)


def gumbel(seed, pos, keys):
    """Noise [..., n] of the tokens `keys` [..., n], drawn at `pos` [...] by requests with `seed` [...]."""
    return -np.log(-np.log1p(-uniform(philox(seed, pos)[..., None], keys)))


def walk(ids, unary, hidden, predecessor, successor, anchors, seeds, positions, temperature):
    """The walk of one block per request. Returns (tokens [n, S], scores [n, S, K]).

    ids, unary [n, S, K]; hidden [n, S, rank]; codebooks [V, rank]; positions [n, S] of the drafted
    tokens; scores are divided by T where T is not 0.
    """
    n, steps, _ = ids.shape
    tokens, scores = np.empty((n, steps), np.int64), np.empty_like(unary)
    hot = np.where(temperature == 0, np.float32(1), temperature)[:, None]
    token, rows = anchors, np.arange(n)
    for t in range(steps):
        gate = predecessor[token] * hidden[:, t]
        scores[:, t] = (unary[:, t] + (successor[ids[:, t]] * gate[:, None]).sum(-1)) / hot
        noise = gumbel(seeds, positions[:, t] + DRAFT_NOISE_OFFSET, ids[:, t])
        drawn = scores[:, t] + np.where(temperature[:, None] == 0, np.float32(0), noise)
        token = tokens[:, t] = ids[rows, t, drawn.argmax(-1)]
    return tokens, scores


def process(logits, history, length, prompt, given, temperature, penalised=None, words_in=None):
    """Logits [n, V] of one row per request as the sampler hands them on; all have the parameters `given`.

    history [n, L]: the row's output so far, of which length [n] tokens count; prompt: token ids;
    given: keyword arguments of SamplingParams and "bad_words" as token ids; temperature [n].
    For samplers that go wrong: how many tokens are penalised, and the history that bad words are sought in.
    """
    n, vocab = logits.shape
    rows, penalised = np.arange(n), length if penalised is None else penalised
    words_in = history if words_in is None else words_in
    logits = logits.copy()
    if allowed := given.get("allowed_token_ids"):
        logits[:, np.setdiff1d(np.arange(vocab), allowed)] = -np.inf
    for token, bias in given.get("logit_bias", {}).items():
        logits[:, token] += logits.dtype.type(bias)
    counts = np.zeros((n, vocab), np.int64)
    for i in range(history.shape[1]):
        counted = (i < penalised) & (history[:, i] >= 0)
        np.add.at(counts, (rows[counted], history[counted, i]), 1)
    seen = (counts > 0) | np.isin(np.arange(vocab), prompt)
    scale = np.where(seen, logits.dtype.type(given.get("repetition_penalty", 1)), logits.dtype.type(1))
    logits *= np.where(logits > 0, 1 / scale, scale)
    logits -= logits.dtype.type(given.get("frequency_penalty", 0)) * counts.astype(logits.dtype)
    logits -= logits.dtype.type(given.get("presence_penalty", 0)) * (counts > 0).astype(logits.dtype)
    for *start, last in given.get("bad_words", ()):
        at = length[:, None] - len(start) + np.arange(len(start))
        match = (at >= 0) & (words_in[rows[:, None], np.maximum(at, 0)] == start)
        logits[match.all(1), last] = -np.inf
    logits /= np.where(temperature == 0, 1, temperature)[:, None].astype(logits.dtype)
    if min_p := given.get("min_p"):
        logits[logits < logits.max(-1, keepdims=True) + np.log(logits.dtype.type(min_p))] = -np.inf
    ascending = np.sort(logits, -1)
    if top_k := given.get("top_k"):
        logits[logits < ascending[:, -top_k, None]] = -np.inf
    if top_p := given.get("top_p"):
        order = np.argsort(logits, -1)
        mass = np.cumsum(np.exp(log_softmax(np.take_along_axis(logits, order, -1))), -1)
        dropped = mass <= 1 - top_p
        dropped[:, -1] = False
        np.put_along_axis(logits, order, np.where(dropped, -np.inf, np.take_along_axis(logits, order, -1)), -1)
    return logits


def log_softmax(x):
    with np.errstate(divide="ignore", invalid="ignore"):
        top = x.max(-1, keepdims=True)
        return x - (top + np.log(np.exp(x - top).sum(-1, keepdims=True)))


def residual_logits(log_p, log_q):
    """Logits of max(p - q, 0), as _resample_kernel computes them."""
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        ratio = np.exp(log_q - log_p)
        return np.where(ratio < 1, log_p + np.log1p(-np.minimum(ratio, np.float32(1))), -np.inf).astype(np.float32)


def judge(target, proposal, drafts, counts, positions, seeds, block):
    """How many drafts are accepted, and the log joint ratio [n, S + 1] that a block residual scales p by.

    target [n, S + 1, V] logits at temperature 1; proposal [n, S, V] likewise; drafts [n, S], of which
    the first counts [n] are verified (-1: a placeholder); positions [n, S + 1]; seeds [n].
    """
    n, steps = drafts.shape
    step = np.arange(steps)
    real = (step < counts[:, None]) & (np.cumsum(drafts < 0, 1) == 0)
    safe = np.maximum(drafts, 0)[..., None]
    log_p, log_q = log_softmax(target[:, :steps]), log_softmax(proposal)
    with np.errstate(invalid="ignore"):
        gain = np.take_along_axis(log_p, safe, 2)[..., 0] - np.take_along_axis(log_q, safe, 2)[..., 0]
    ratio = np.zeros((n, steps + 1), np.float32)
    if not block:
        u = uniform(seeds[:, None], positions[:, :steps])
        accepted = np.cumprod(real & (gain > np.log(u)), 1).sum(1)
        return accepted, ratio
    u = uniform((seeds ^ (positions[:, 0] << 32))[:, None], positions[:, :steps])
    for t in range(steps):
        with np.errstate(invalid="ignore"):
            ratio[:, t + 1] = np.minimum(ratio[:, t] + gain[:, t], 0)
    joint = np.exp(ratio[:, 1:])
    mass = np.zeros_like(joint)
    ahead = joint[:, :-1, None] * np.exp(log_p[:, 1:]) - np.exp(log_q[:, 1:])
    mass[:, :-1] = np.maximum(ahead, 0).sum(-1)
    left = mass + 1 - joint
    h = np.where(left > 0, mass / np.where(left > 0, left, 1), np.float32(1))
    last = np.concatenate([~real[:, 1:], np.ones((n, 1), bool)], 1)
    h = np.where(last, joint, h)
    accepted = np.where(real & (u <= h), step + 1, 0).max(1)
    return accepted, ratio


def verify(target, proposal, drafts, counts, positions, seeds, temperature, block=False):
    """rejection_sample over padded arrays (see judge). Returns (sampled [n, S + 1], num_sampled [n]).

    target holds logits already divided by T; entries of `sampled` past num_sampled are meaningless.
    """
    n, steps = drafts.shape
    rows, greedy = np.arange(n), temperature == 0
    accepted, ratio = judge(target, proposal, drafts, counts, positions, seeds, block)
    best = target.argmax(-1)
    agreed = (np.arange(steps) < counts[:, None]) & (best[:, :steps] == drafts)
    accepted = np.where(greedy, np.cumprod(agreed, 1).sum(1), accepted)
    p = log_softmax(target[rows, accepted]) + (ratio[rows, accepted][:, None] if block else np.float32(0))
    stop = np.minimum(accepted, steps - 1)
    drawn_freely = (accepted == counts) | (drafts[rows, stop] < 0)
    logits = np.where(
        drawn_freely[:, None], target[rows, accepted], residual_logits(p, log_softmax(proposal[rows, stop]))
    )
    noise = gumbel(seeds, positions[rows, accepted], np.arange(target.shape[-1]))
    token = (logits + np.where(greedy[:, None], np.float32(0), noise)).argmax(-1)
    sampled = np.concatenate([drafts, np.zeros((n, 1), np.int64)], 1)
    sampled[rows, accepted] = np.where(greedy, best[rows, accepted], token)
    return sampled, accepted + 1
