#!/usr/bin/env bash
# Checks the memory guarantees, each item by its own command, on every available device; prints a table at the end.
#
#   cargo xtask memory             in a checkout
#   ./check_memory.sh [ITEM...]    in a bundle: everything, or only the named items (1, 2, savings, ...)
#
# DEVICES ("cuda wgpu") lists the devices. A missing device is reported as not available, or as a failure if FOREBAY_REQUIRE
# names it. LIMIT is the time limit of a command in seconds (600). Logs go to $OUT, or to logs/ next to this script.
set -u
here=$(cd "$(dirname "$0")" && pwd)
# Set by `cargo xtask memory`; in a bundle, run.sh sets the environment that finds the drivers.
if [ -z "${PROGRAMS:-}" ]; then
    NO_STEPS=1
    . "$here/run.sh"
    PROGRAMS=$bin
    TESTS=$tests
    PEERS=$here/peers
fi
logs=${OUT:-$here/logs}
limit=${LIMIT:-600}
mkdir -p "$logs"
example=$PROGRAMS
[ -d "$PROGRAMS/examples" ] && example=$PROGRAMS/examples
suite=$PROGRAMS/forebay-conformance
export FOREBAY_DATA=${FOREBAY_DATA:-$TESTS/data}

wanted=("$@")
chosen() {
    [ ${#wanted[@]} -eq 0 ] && return 0
    local item
    for item in "${wanted[@]}"; do [[ $1 == "$item" ]] && return 0; done
    return 1
}

table=()
failures=0
# line ITEM WHAT DEVICE VERDICT SECONDS WORDS
line() {
    table+=("$(printf '%-13s %-34s %-5s %-14s %4ss  %s' "$1" "$2" "$3" "$4" "$5" "${6:0:110}")")
    echo "${table[-1]}"
    [ "$4" != FAILED ] || failures=$((failures + 1))
}
# check ITEM WHAT DEVICE COMMAND...: passes if the command exits with 0.
check() {
    local item=$1 what=$2 device=$3 start=$SECONDS log ended said
    shift 3
    chosen "$item" || return 0
    log=$logs/memory-$item-$(echo "$what-$device" | tr -c 'a-zA-Z0-9\n' -).log
    timeout -k 10 "$limit" "$@" >"$log" 2>&1
    ended=$?
    said=$(tr '\r' '\n' <"$log" | grep -v '^ *$' | tail -1)
    if [ $ended -eq 0 ]; then
        line "$item" "$what" "$device" passed $((SECONDS - start)) "$said"
    else
        tail -5 "$log"
        line "$item" "$what" "$device" FAILED $((SECONDS - start)) "status $ended: $said"
    fi
}
# missing ITEM WHAT DEVICE WHY
missing() { chosen "$1" && line "$1" "$2" "$3" "not available" 0 "$4"; }

# tests_of ITEM WHAT REGEX: runs matching tests of the conformance suite on each device; not available if there are none.
tests_of() {
    local item=$1 what=$2 device names
    chosen "$item" || return 0
    mapfile -t names < <("$suite" test --list | grep -E "$3")
    if [ ${#names[@]} -eq 0 ]; then
        missing "$item" "$what" - "the suite has no such test yet"
        return
    fi
    for device in $devices; do
        check "$item" "$what" "$device" "$suite" test --device "$device" "${names[@]}"
    done
}
# on_each ITEM WHAT COMMAND...: runs the command on each device.
on_each() {
    local item=$1 what=$2 program=$3 device
    shift 3
    for device in $devices; do check "$item" "$what" "$device" "$program" --device "$device" "$@"; done
}

found=$("$suite" devices)
echo "$found"
devices=
for device in ${DEVICES:-cuda wgpu}; do
    if grep -E "^$device:?[0-9]* " <<<"$found" | grep -qv 'not found'; then
        devices="$devices $device"
    elif [[ ",${FOREBAY_REQUIRE:-}," == *",$device,"* ]]; then
        line devices "a device of $device" "$device" FAILED 0 "required by FOREBAY_REQUIRE"
    else
        line devices "a device of $device" "$device" "not available" 0 "$(grep "^$device" <<<"$found" | head -1)"
    fi
done

# Dry run of 7 billion parameters in under two seconds; test builds may take longer.
seven_billion() {
    local said
    said=$("$example/dry_run" --card h200) || return 1
    echo "$said"
    awk '/billion parameters/ { n = $1 } /events/ { for (k = 1; k < NF; k++) if ($(k + 1) ~ /^s;/) s = $k }
        END { printf "%s billion parameters in %s s\n", n, s; exit !(n > 6.5 && s < 2) }' <<<"$said"
}
# Snapshots of a training: report, comparison and page.
recorded() {
    local device=$1 folder=$logs/memory-$1
    mkdir -p "$folder"
    "$example/train_text" --device "$device" --steps 4 --batch 4 --length 32 --layers 2 --width 64 --generate 1 \
        --data "$TESTS/data/shakespeare.txt" --save "$folder/text.safetensors" --memory-snapshot "$folder/a.json" &&
        "$example/train_text" --device "$device" --steps 2 --batch 4 --length 32 --layers 2 --width 64 --generate 1 \
            --data "$TESTS/data/shakespeare.txt" --save "$folder/text.safetensors" \
            --memory-snapshot "$folder/a.pickle" &&
        "$PROGRAMS/forebay" memory report "$folder/a.json" &&
        "$PROGRAMS/forebay" memory diff "$folder/a.json" "$folder/a.json" &&
        "$PROGRAMS/forebay" memory view "$folder/a.json" --out "$folder/a.html" &&
        grep -q '</html>' "$folder/a.html" && echo "report, difference and page of $(grep -o '"action"' "$folder/a.json" | wc -l) events"
}
replayed() {
    "$PROGRAMS/forebay" replay "$TESTS"/traces/gpt2_train_varlen.trace.xz --config "" --config pytorch
}

export -f seven_billion recorded replayed
export example logs PROGRAMS TESTS

check 1 "7 billion parameters, dry" - bash -c seven_billion
tests_of 1 "predicted = reserved, to the byte" '^plan/.*predicted_bytes'
tests_of 2 "budgets are kept or refused" '^plan/(a_budget|a_step_that)'
check 2 "forebay plan, without a GPU" - "$PROGRAMS/forebay" plan --model gpt2-124m --batch 8 --context 1024 \
    --budget 4GiB --card rtx4090
tests_of 2 "offload, planned" '^plan/.*(offload|host)'
tests_of 3 "autocast and GradScaler" '^(amp|grad_scaler)/'
tests_of 4 "accumulation and checkpointing" 'micro_batches|accumulated_batches|checkpoint'
tests_of 5 "out of memory at every request" '^fault_injection/|a_full_device|a_step_that_runs_out_of_memory'
for device in $devices; do check 6 "recorded, reported, viewed" "$device" bash -c "recorded $device"; done
if ! python3 -c 'import torch' 2>/dev/null; then
    missing 6 "a snapshot in PyTorch's tools" - "PyTorch is not installed"
else
    for device in $devices; do
        check 6 "a snapshot in PyTorch's tools" "$device" python3 "$PEERS/check_snapshot.py" "$logs/memory-$device/a.pickle"
    done
fi
check 6 "traces under other settings" - bash -c replayed
tests_of 7 "streams, host memory, own pools" '^streams/'
check 8 "traces and PyTorch's allocator" - "$suite" traces --dir "$TESTS/traces"
on_each 9 "questions about memory" "$example/memory_questions"
on_each savings "the table, predicted = reserved" "$example/savings"
on_each fragmentation "more than PyTorch's rules allow" "$example/fragmentation"
if python3 -c 'import torch; assert torch.cuda.is_available()' 2>/dev/null; then
    "$example/fragmentation" --device cuda --memory-snapshot "$logs/fragmentation.json" >/dev/null 2>&1
    check savings "the same in PyTorch" torch python3 "$PEERS/savings.py"
    check fragmentation "the same in PyTorch" torch python3 "$PEERS/fragmentation.py"
    check fragmentation "the same requests in PyTorch" torch python3 "$PEERS/fragmentation.py" \
        --sizes "$logs/fragmentation.json"
else
    missing savings "the same in PyTorch" torch "there is no PyTorch with a GPU"
    missing fragmentation "the same in PyTorch" torch "there is no PyTorch with a GPU"
fi

echo
printf '%-13s %-34s %-5s %-14s %5s  %s\n' item what on verdict time 'last line'
printf '%s\n' "${table[@]}" | tee "$logs/memory.txt"
echo
count() { printf '%s\n' "${table[@]}" | grep -c " $1 "; }
echo "$(count passed) passed, $failures failed, $(count 'not available') skipped"
[ "$failures" -eq 0 ]
