"""Checks that PyTorch's own tools read a snapshot that forebay wrote.

    python3 benches/peers/check_snapshot.py snapshot.pickle [--out FOLDER]

Runs every tool of torch.cuda._memory_viz on the file. Exits with 1 if one of them fails, or if the contents contradict
themselves. Needs PyTorch, but no GPU. Writes the two plots to FOLDER, if present.
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
STATES = {"active_allocated", "active_pending_free", "inactive"}


def lines(text):
    """Replaces the flame graph, for which the tools would load a script from the network."""
    return text


def check_contents(data):
    for segment in data["segments"]:
        blocks = segment["blocks"]
        sizes = sum(b["size"] for b in blocks)
        assert sizes == segment["total_size"], f"blocks of {sizes} bytes in a segment of {segment['total_size']}"
        unknown = {b["state"] for b in blocks} - STATES
        assert not unknown, f"unknown states: {unknown}"
        live = [b for b in blocks if b["state"] == "active_allocated"]
        assert sum(b["size"] for b in live) == segment["allocated_size"], "allocated_size is not the sum of live blocks"
        for one, other in zip(blocks, blocks[1:]):
            assert one["address"] + one["size"] == other["address"], "blocks leave a gap"
    for trace in data["device_traces"]:
        unknown = {e["action"] for e in trace} - ACTIONS
        assert not unknown, f"unknown actions: {unknown}"
        times = [e["time_us"] for e in trace]
        assert times == sorted(times), "events are out of order"


def check_history(data):
    """Undoes every event, as the viewer's script does, and fails if an event contradicts later ones."""
    memory, blocks = set(), {}
    for segment in data["segments"]:
        memory.add((segment["address"], segment["address"] + segment["total_size"]))
        for block in segment["blocks"]:
            if block["state"] != "inactive":
                blocks[block["address"]] = block["state"]
    for event in (e for trace in data["device_traces"] for e in reversed(trace)):
        action, start = event["action"], event.get("addr")
        end = None if start is None else start + event["size"]
        if action == "alloc":
            assert blocks.pop(start, None) == "active_allocated", f"what {event} lent is not there"
        elif action == "free_completed":
            assert start not in blocks, f"what {event} freed is there"
            blocks[start] = "active_pending_free"
        elif action == "free_requested":
            assert blocks.get(start) == "active_pending_free", f"what {event} freed does not wait"
            blocks[start] = "active_allocated"
        elif action in ("segment_free", "segment_unmap"):
            memory.add((start, end))
        elif action in ("segment_alloc", "segment_map"):
            # Mapped memory is a list of ranges; the ranges that this event removes from are merged first.
            parts = sorted(m for m in memory if m[0] < end and start < m[1])
            assert parts and parts[0][0] <= start and end <= parts[-1][1], f"the memory of {event} is not there"
            assert all(a[1] == b[0] for a, b in zip(parts, parts[1:])), f"the memory of {event} has a gap"
            memory -= set(parts)
            memory |= {m for m in ((parts[0][0], start), (end, parts[-1][1])) if m[0] < m[1]}
        if action.startswith("free"):
            assert any(m[0] <= start < m[1] for m in memory), f"the block of {event} lies in no segment"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("snapshot", type=pathlib.Path)
    parser.add_argument("--out", type=pathlib.Path, help="where to write the plots")
    args = parser.parse_args()
    with args.snapshot.open("rb") as file:
        data = pickle.load(file)

    tools = {
        "contents": lambda: check_contents(data),
        "history": lambda: check_history(data),
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
        except Exception as error:  # Every error of a tool is a finding to report.
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
