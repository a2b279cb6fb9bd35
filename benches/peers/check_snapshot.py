"""Checks that PyTorch's own tools read a snapshot that forebay wrote.

    python3 benches/peers/check_snapshot.py snapshot.pickle [--out FOLDER]

Runs every tool of torch.cuda._memory_viz on the file, and exits with 1 if one of them fails, or if what they read
contradicts itself. No GPU is needed, but PyTorch is. The two plots are written to FOLDER, if one is given.
"""

import argparse
import pathlib
import pickle
import sys

from torch.cuda import _memory_viz

ACTIONS = {
    "alloc", "free_requested", "free_completed", "segment_alloc", "segment_free", "segment_map", "segment_unmap",
    "oom", "snapshot",
}


def lines(text):
    """In place of the flame graph, for which the tools would load a script from the network."""
    return text


def check_contents(data):
    for segment in data["segments"]:
        blocks = segment["blocks"]
        sizes = sum(b["size"] for b in blocks)
        assert sizes == segment["total_size"], f"blocks of {sizes} bytes in a segment of {segment['total_size']}"
        live = [b for b in blocks if b["state"] == "active_allocated"]
        assert sum(b["size"] for b in live) == segment["allocated_size"], "allocated_size is not the sum of live blocks"
        for one, other in zip(blocks, blocks[1:]):
            assert one["address"] + one["size"] == other["address"], "blocks leave a gap"
    for trace in data["device_traces"]:
        unknown = {e["action"] for e in trace} - ACTIONS
        assert not unknown, f"unknown actions: {unknown}"
        times = [e["time_us"] for e in trace]
        assert times == sorted(times), "events are out of order"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("snapshot", type=pathlib.Path)
    parser.add_argument("--out", type=pathlib.Path, help="where to write the plots")
    args = parser.parse_args()
    with args.snapshot.open("rb") as file:
        data = pickle.load(file)

    tools = {
        "contents": lambda: check_contents(data),
        "segsum": lambda: _memory_viz.segsum(data),
        "trace": lambda: _memory_viz.trace(data),
        "memory": lambda: _memory_viz.memory(data, format_flamegraph=lines),
        "segments": lambda: _memory_viz.segments(data, format_flamegraph=lines),
        "compare": lambda: _memory_viz.compare(data["segments"], data["segments"], format_flamegraph=lines),
        "trace_plot": lambda: _memory_viz.trace_plot(data),
        "segment_plot": lambda: _memory_viz.segment_plot(data),
    }
    failed = 0
    for name, tool in tools.items():
        try:
            result = tool()
        except Exception as error:  # Whatever a tool raises is what this program is there to tell.
            failed += 1
            print(f"{name}: FAILED: {type(error).__name__}: {error}")
            continue
        print(f"{name}: ok" + (f", {len(result)} characters" if isinstance(result, str) else ""))
        if name == "segsum":
            print(result)
        if args.out and name.endswith("_plot"):
            args.out.mkdir(parents=True, exist_ok=True)
            (args.out / f"{name}.html").write_text(result)
    segments, events = len(data["segments"]), sum(map(len, data["device_traces"]))
    print(f"{args.snapshot}: {segments} segments, {events} events, {failed} tools failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
