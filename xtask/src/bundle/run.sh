#!/usr/bin/env bash
# Runs the programs of the bundle on this machine's GPU, through CUDA and Vulkan, and prints a table at the end.
#
#   ./run.sh              everything
#   ./run.sh golden bench only the steps whose names begin with these
#
# Logs go to $OUT, or to logs/ next to this script. LIMIT is the time limit of a step in seconds (600). AT_ONCE is the number
# of parallel steps, except for measurements (half of the processors, at most 8).
set -u
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cd "$here" || exit 1
logs=${OUT:-$here/logs}
limit=${LIMIT:-600}
mkdir -p "$logs"

# Programs are compressed in the bundle, and unpacked at the first start.
bin=$here/bin
if [ -e "$here/programs.tar.xz" ] && [ ! -d "$bin" ]; then
    tar -C "$here" -xJf "$here/programs.tar.xz" || { rm -rf "$bin"; exit 1; }
fi

# The bundle has a Vulkan loader for machines without one. Some machines keep the driver's manifest elsewhere.
has_library() { ldconfig -p 2>/dev/null | grep -q "$1"; }
if ! has_library libvulkan.so.1 && [ -d "$here/lib" ]; then
    export LD_LIBRARY_PATH="$here/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
fi
if [ -z "${VK_DRIVER_FILES:-}" ] && ! ls /usr/share/vulkan/icd.d/nvidia* /etc/vulkan/icd.d/nvidia* >/dev/null 2>&1; then
    for manifest in /usr/local/nvidia/share/vulkan/icd.d/nvidia_icd.json /opt/nvidia/share/vulkan/icd.d/nvidia_icd.json; do
        [ -e "$manifest" ] && export VK_DRIVER_FILES=$manifest VK_ICD_FILENAMES=$manifest && break
    done
fi
# CUDA's toolkit is often missing from the linker's cache.
for folder in /usr/local/cuda/lib64 /usr/local/cuda/targets/x86_64-linux/lib; do
    if ! has_library libnvrtc.so && [ -d "$folder" ]; then
        export LD_LIBRARY_PATH="${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}$folder"
    fi
done
export XDG_RUNTIME_DIR=${XDG_RUNTIME_DIR:-$logs}
# A lean bundle is inside a checkout, which has the reference data.
tests=$here/tests
[ -d "$tests" ] || tests=$(cd "$here/../../tests" && pwd) || exit 1
# Without a data set, programs use the small part that is built in.
if [ -d "$here/data" ]; then export FOREBAY_DATA=${FOREBAY_DATA:-$here/data}; fi
export FOREBAY_GOLDEN=${FOREBAY_GOLDEN:-$tests/golden}
# check_memory.sh needs only this environment.
[ -z "${NO_STEPS:-}" ] || return 0

wanted=("$@")
chosen() {
    [ ${#wanted[@]} -eq 0 ] && return 0
    local prefix
    for prefix in "${wanted[@]}"; do [[ $1 == "$prefix"* ]] && return 0; done
    return 1
}

# Steps that measure nothing may share the machine.
most=$(($(nproc) / 2))
at_once=${AT_ONCE:-$((most > 8 ? 8 : most > 1 ? most : 1))}
summary=$logs/summary.txt
: >"$summary"
# step NAME COMMAND...: runs a command, keeps its log, and records its exit status and last line; in parallel with other
# steps, up to at_once.
step() {
    chosen "$1" || return 0
    while [ "$(jobs -rp | wc -l)" -ge "$at_once" ]; do wait -n; done
    if [ "$at_once" -gt 1 ]; then run_step "$@" & else run_step "$@"; fi
}
run_step() {
    local name=$1 start=$SECONDS ended last
    shift
    echo "=== $name: $*"
    timeout -k 10 "$limit" "$@" >"$logs/$name.log" 2>&1
    ended=$?
    last=$(tr '\r' '\n' <"$logs/$name.log" | grep -E '[0-9]+ passed|accuracy|tokens/s|[Ee]rror|FAILED' | tail -1)
    [ -n "$last" ] || last=$(tr '\r' '\n' <"$logs/$name.log" | grep -v '^ *$' | tail -1)
    [ $ended -eq 0 ] || tail -5 "$logs/$name.log"
    printf '%-22s %4s %5ss  %s\n' "$name" "$([ $ended -eq 0 ] && echo ok || echo "$ended")" $((SECONDS - start)) \
        "${last:0:110}" >>"$summary"
}

suite=$bin/forebay-conformance
step devices "$suite" devices
# The suite on both devices, and on CUDA with the launch thread always in use, in eight parts of full test names.
tests_of_suite=$("$suite" test --list)
for device in cuda wgpu cuda-thread; do
    settings=
    [ $device = cuda-thread ] && settings=FOREBAY_CUDA_LAUNCH_THREAD=1
    for share in 0 1 2 3 4 5 6 7; do
        mapfile -t names < <(awk -v share=$share 'NR % 8 == share { print $0 "/" }' <<<"$tests_of_suite")
        step "conformance-$device-$share" env $settings "$suite" test --device "${device%-thread}" "${names[@]}"
    done
done
for dtype in f32 bf16 f16 f64; do
    for data in golden golden_more; do
        for device in cuda wgpu; do
            step "$data-$device-$dtype" "$suite" golden --dir "$tests/$data" --device $device --dtype $dtype
        done
        step "$data-portable-$dtype" env FOREBAY_PORTABLE_KERNELS=1 \
            "$suite" golden --dir "$tests/$data" --device cuda --dtype $dtype
    done
done
for device in cuda wgpu; do
    step "chains-$device" "$suite" fuzz chains --programs 2000 --gradients 1000 --seed 1 --device $device
    step "programs-$device" "$suite" fuzz programs --programs 300 --seed 1 --device $device
done
step curves-cuda "$suite" curves --dir "$tests/curves" --device cuda
step curves-wgpu "$suite" curves --dir "$tests/curves" --device wgpu
step traces "$suite" traces --dir "$tests/traces"
wait
at_once=1
for device in cuda wgpu; do
    mkdir -p "$logs/images-$device"
    step "train-images-$device" env -C "$logs/images-$device" "$bin/train_images" --device "$device" --curve curve.csv
done
# Time of a small program from its start to its first printed loss (step 50): with an empty kernel cache, then a full one.
first() {
    local began=${EPOCHREALTIME/./} line
    "$bin/by_hand" | while read -r line; do
        echo "$line"
        [[ $line != step* ]] || printf '%d ms from its start\n' $(((${EPOCHREALTIME/./} - began) / 1000))
    done | awk '/from its start/ { if (!first) first = $0 } { print } END { print first; exit !first }'
}
export -f first
export bin tests logs
for device in cuda wgpu; do
    kept="FOREBAY_DEVICE=$device FOREBAY_CACHE_DIR=$logs/first-$device"
    rm -rf "$logs/first-$device"
    step "first-$device-cold" env $kept CUDA_CACHE_DISABLE=1 __GL_SHADER_DISK_CACHE=0 bash -c first
    step "first-$device-warm" env $kept bash -c first
done
# Modules and operations as NVTX ranges in an NVIDIA tool.
ranges() {
    FOREBAY_NVTX=1 FOREBAY_DEVICE=cuda ncu --nvtx --clock-control none --section LaunchStats --launch-count 60 \
        "$bin/by_hand" >"$logs/ncu.log" 2>&1
    tail -5 "$logs/ncu.log"
    grep -oE '<[0-9]+,[^>]*>' "$logs/ncu.log" | sort | uniq -c
    echo "kernels in ranges of fc1: $(grep -c ',fc1' "$logs/ncu.log")"
    grep -q ',fc1' "$logs/ncu.log"
}
export -f ranges
command -v ncu >/dev/null && step nvtx bash -c ranges
# Language models on CUDA: captured, resumed from a checkpoint, accumulated, long context, budget, 1.5 billion parameters.
writes() {
    local name=$1
    shift
    step "gpt-$name" "$bin/train_gpt" --device cuda --data "$tests/data/shakespeare.txt" --vocabulary 8192 --generate 20 \
        --save "$logs/gpt-$name.safetensors" "$@"
}
writes capture --preset gpt2 --steps 120 --capture --checkpoint-every 60
writes resume --preset gpt2 --steps 120 --capture --resume "$logs/gpt-capture.checkpoint"
writes accumulate --preset gpt2 --steps 24 --accumulate 4
writes long --preset gpt2 --steps 24 --batch 1 --length 16384
writes budget --preset gpt2 --steps 40 --budget 3GiB
writes xl --preset gpt2-xl --steps 12 --recompute
writes profile --preset gpt2 --steps 20 --profile "$logs/gpt-profile.json"
for device in cuda wgpu; do
    step "bench-$device" "$bin/forebay-bench" run --device "$device"
done
if [ -e "$here/peers/torch_bench.py" ] && python3 -c 'import torch' 2>/dev/null; then
    torch() {
        local bench
        for bench in matmul elementwise reduce alloc eager mlp; do
            python3 "$here/peers/torch_bench.py" --bench $bench || return 1
        done
        for bench in elementwise reduce mlp; do
            python3 "$here/peers/torch_bench.py" --bench $bench --variant compile || return 1
        done
        for bench in "attention --variant flash" "attention --variant cudnn" "vision --variant f32,bf16" \
            "gpt2 --variant bf16,bf16_compile"; do
            # Split into words: a bench and its variant.
            python3 "$here/peers/torch_bench.py" --bench $bench || return 1
        done
        python3 "$here/peers/models.py"
    }
    export -f torch
    export here
    step bench-torch bash -c torch
    if [ -s "$logs/bench-torch.log" ]; then
        "$bin/forebay-bench" compare "$logs/bench-cuda.log" "$logs/bench-wgpu.log" --peer "$logs/bench-torch.log" |
            tee "$logs/bench.md"
    fi
    losses() {
        "$bin/forebay-bench" curve "$logs/gpt2-curve" --device cuda &&
            python3 "$here/peers/gpt2_curve.py" "$logs/gpt2-curve" "$tests/data/shakespeare.txt"
    }
    export -f losses
    step curve-torch bash -c losses
fi

wait
echo
printf '%-22s %4s %6s  %s\n' step end time 'what it said'
cat "$summary"
echo
# Totals of the suite's parts that ran.
for device in cuda wgpu cuda-thread; do
    awk -v on=$device '$1 ~ "^conformance-" on "-[0-7]$" { print $1 ".log" }' "$summary" | (cd "$logs" && xargs -r cat) |
        awk -v on=$device '/^[0-9]+ passed, / { p += $1; f += $3; s += $5 }
            END { if (NR) print "conformance, " on ": " p + 0 " passed, " f + 0 " failed, " s + 0 " skipped" }'
done
failures=$(awk '$2 != "ok"' "$summary" | wc -l)
echo "$(wc -l <"$summary") steps, $failures failed"
[ "$failures" -eq 0 ]
