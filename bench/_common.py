"""What the kernel benchmarks share: loading kernels, timing by graph replay, floors, tables and plots."""

import ast
import json
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import median

import torch

from tests.support.kernels import triton_utils

REPO = Path(__file__).resolve().parent.parent
UPSTREAM = "--upstream takes a folder that holds vllm 0.33.0"
CACHE_FACTOR = 3  # rotate over this many times the L2, so that nothing timed as cold is still in it


def require_gpu():
    if not torch.cuda.is_available():
        raise SystemExit(f"error: {sys.argv[0]} needs a GPU that torch can see")


def upstream_file(path):
    if not path.is_file():
        raise SystemExit(f"error: no {path}; {UPSTREAM}")
    return path


def load_upstream(path, *names, **imported):
    """Functions and classes of an upstream module, run from its own file with torch, Triton and `imported`."""
    tree = ast.parse(upstream_file(path).read_text())
    tree.body = [
        node
        for node in tree.body
        if (isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name in names)
        or (isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant))
    ]
    stub = triton_utils()
    scope = {"__name__": f"upstream_{path.stem}", "torch": torch, "tl": stub.tl, "triton": stub.triton, **imported}
    exec(compile(tree, str(path), "exec"), scope)
    missing = [name for name in names if name not in scope]
    if missing:
        raise SystemExit(f"error: {path} has no {', '.join(missing)}; {UPSTREAM}")
    return [scope[name] for name in names]


def precompile(worker, jobs):
    """Runs worker(job) in one process per core, which leaves the kernels in Triton's disk cache."""
    workers = min(len(jobs), max(1, (multiprocessing.cpu_count() or 2) - 1), 15)
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        list(pool.map(worker, jobs))


def rotations(bytes_per_call, most=64):
    """How many input sets keep a call from finding its input in L2."""
    l2 = torch.cuda.get_device_properties(0).L2_cache_size
    return max(2, min(most, -(-CACHE_FACTOR * l2 // bytes_per_call)))


def time_graph(calls, replays=15, least=32):
    """Median microseconds per call: `calls` one after another in a CUDA graph, repeated to at least `least`."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    repeats = -(-least // len(calls))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            for call in calls:
                call()
    times = []
    for _ in range(replays + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1000 * start.elapsed_time(end) / (repeats * len(calls)))
    return median(times[3:])


def copy_bandwidth(bytes_copied=1 << 32):
    """Bytes per second of a large elementwise kernel, read and written counted."""
    source = torch.empty(bytes_copied // 4, dtype=torch.int32, device="cuda").random_()
    target = torch.empty_like(source)
    # Not copy_: that is a memcpy node, and slower than a kernel.
    micros = time_graph([lambda: torch.bitwise_not(source, out=target)], replays=7, least=3)
    return 2 * bytes_copied / micros * 1e6


def empty_kernel_time():
    """Microseconds a kernel that does next to nothing takes in a graph: the floor of a launch."""
    x = torch.zeros(1, device="cuda")
    return time_graph([x.zero_], least=200)


def machine():
    import triton

    return {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}


def table(rows):
    """Dicts with the same keys as a Markdown table; floats to one decimal, ratios to two, None as a dash."""

    def cell(name, value):
        fine = name in ("ratio", "goal") or " / " in name or name.startswith("tokens per pass")
        digits = 2 if fine else 1
        return "–" if value is None else f"{value:.{digits}f}" if isinstance(value, float) else str(value)

    lines = [list(rows[0])] + [[cell(*item) for item in row.items()] for row in rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    text = ["| " + " | ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) + " |" for line in lines]
    return "\n".join([text[0], "|" + "|".join("-" * (w + 2) for w in widths) + "|", *text[1:]])


def write(out, name, sections, plot):
    """Prints the tables; with `out`, also writes NAME.md, NAME.json and, through plot(axes), NAME.png."""
    info = machine()
    head = ", ".join(f"{key} {value}" for key, value in info.items())
    text = f"{head}\n\n" + "\n\n".join(f"{title}\n\n{table(rows)}" for title, rows in sections.items()) + "\n"
    print(text)
    if out is None:
        return
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{name}.md").write_text(text)
    (out / f"{name}.json").write_text(json.dumps({"machine": info, **sections}, indent=1))
    try:
        import matplotlib
    except ImportError:
        print("no plot: matplotlib is not installed")
        return
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    plot(axes)
    axes.legend()
    axes.grid(alpha=0.3, which="both")
    figure.savefig(out / f"{name}.png", dpi=120)
