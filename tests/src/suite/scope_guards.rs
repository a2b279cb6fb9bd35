//! Thread-local scopes: guards may be dropped in any order, after panics, and at the end of a thread.

use std::cell::RefCell;

use anyhow::{Result, ensure};
use forebay::amp::{autocast, autocast_dtype, fp8, is_fp8_enabled, no_autocast};
use forebay::autograd::{self, detect_anomaly, enable_grad, no_grad};
use forebay::device::Device;
use forebay::dtype::DType;
use forebay::memory::{Tag, scope};
use forebay::nn::{Linear, init};
use forebay::stream::Stream;
use forebay::tensor::Tensor;

use super::host_reference::SplitMix64;
use super::tests;

tests![
    the_innermost_live_guard_applies,
    casts_are_freed_with_the_last_scope_in_any_order,
    a_panic_ends_its_scopes,
    guards_in_thread_locals_end_with_their_thread,
];

/// Any scope guard.
#[allow(dead_code, reason = "guards are held, not read")]
enum AnyGuard {
    Autocast(forebay::amp::AutocastGuard),
    Fp8(forebay::amp::Fp8Guard),
    Anomaly(autograd::DetectAnomalyGuard),
    NoGrad(autograd::NoGradGuard),
    EnableGrad(autograd::EnableGradGuard),
    Scope(scope::ScopeGuard),
    LayerDType(init::DefaultDTypeGuard),
    Stream(forebay::stream::StreamGuard),
}

/// Settings of this thread's scopes.
#[derive(Clone, Debug, PartialEq)]
struct ScopeState {
    autocast: Option<DType>,
    fp8: bool,
    grad: bool,
    tag: Tag,
    op: &'static str,
    layer_dtype: DType,
    on_side_stream: bool,
}

impl ScopeState {
    fn read(device: &Device, side: &Stream) -> Result<Self> {
        let scope = scope::current();
        let layers = Linear::without_bias(1, 1, &Device::null(Default::default()))?.weight.dtype();
        Ok(Self {
            autocast: autocast_dtype(),
            fp8: is_fp8_enabled(),
            grad: autograd::is_grad_enabled(),
            tag: scope.tag,
            op: scope.op,
            layer_dtype: layers,
            on_side_stream: Stream::current(device) == *side,
        })
    }

    /// Applies the setting of a guard of this kind.
    fn apply_guard(&mut self, kind: usize) {
        match kind {
            0 => self.autocast = Some(DType::BF16),
            1 => self.autocast = Some(DType::F16),
            2 => self.autocast = None,
            3 => self.fp8 = true,
            4 | 9 => {}
            5 => self.grad = false,
            6 => self.grad = true,
            7 => self.tag = Tag::Gradient,
            8 => self.op = "scopes",
            10 => self.layer_dtype = DType::BF16,
            _ => self.on_side_stream = true,
        }
    }
}

const KINDS: usize = 12;

fn enter(kind: usize, side: &Stream) -> Result<AnyGuard> {
    Ok(match kind {
        0 => AnyGuard::Autocast(autocast(DType::BF16)?),
        1 => AnyGuard::Autocast(autocast(DType::F16)?),
        2 => AnyGuard::Autocast(no_autocast()),
        3 => AnyGuard::Fp8(fp8()),
        4 => AnyGuard::Anomaly(detect_anomaly()),
        5 => AnyGuard::NoGrad(no_grad()),
        6 => AnyGuard::EnableGrad(enable_grad()),
        7 => AnyGuard::Scope(scope::enter_tag(Tag::Gradient)),
        8 => AnyGuard::Scope(scope::enter_op("scopes")),
        9 => AnyGuard::Anomaly(detect_anomaly().with_forward()),
        10 => AnyGuard::LayerDType(init::default_dtype(DType::BF16)?),
        _ => AnyGuard::Stream(side.enter()),
    })
}

fn the_innermost_live_guard_applies(device: &Device) -> Result<()> {
    let mut rng = SplitMix64(11);
    let side = Stream::new(device);
    let outside = ScopeState::read(device, &side)?;
    for _ in 0..20 {
        let mut alive: Vec<(usize, AnyGuard)> = Vec::new();
        for _ in 0..40 {
            if alive.is_empty() || rng.below(5) < 3 {
                let kind = rng.below(KINDS);
                alive.push((kind, enter(kind, &side)?));
            } else {
                drop(alive.remove(rng.below(alive.len())));
            }
            let mut expected = outside.clone();
            alive.iter().for_each(|(kind, _)| expected.apply_guard(*kind));
            let now = ScopeState::read(device, &side)?;
            let kinds: Vec<usize> = alive.iter().map(|(kind, _)| *kind).collect();
            ensure!(now == expected, "{kinds:?}: {now:?}, not {expected:?}");
        }
        // Drops the rest like a vector: in the order of creation.
        drop(alive);
        ensure!(ScopeState::read(device, &side)? == outside, "a scope outlives its guard");
    }
    Ok(())
}

fn casts_are_freed_with_the_last_scope_in_any_order(device: &Device) -> Result<()> {
    let w = Tensor::ones([64, 64], DType::F32, device)?.to_leaf()?;
    let held = device.memory().allocated();
    let [first, second] = [autocast(DType::BF16)?, autocast(DType::BF16)?];
    drop(w.matmul(&w)?);
    ensure!(device.memory().allocated() > held, "no cast was kept");
    drop(first);
    ensure!(
        device.memory().allocated() > held && autocast_dtype().is_some(),
        "the inner scope ended with the outer guard"
    );
    drop(second);
    ensure!(device.memory().allocated() == held && autocast_dtype().is_none(), "casts stay");
    Ok(())
}

fn a_panic_ends_its_scopes(device: &Device) -> Result<()> {
    let side = Stream::new(device);
    let outside = ScopeState::read(device, &side)?;
    let unwound = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        let mut guards: Vec<_> = (0..KINDS).map(|kind| enter(kind, &side)).collect();
        guards.swap(0, KINDS - 1);
        let inner = autocast(DType::F16);
        drop(guards.remove(3));
        // Not `panic!`, which would print a message.
        std::panic::resume_unwind(Box::new(inner.is_ok()));
    }));
    ensure!(unwound.is_err() && ScopeState::read(device, &side)? == outside);
    Ok(())
}

fn guards_in_thread_locals_end_with_their_thread(device: &Device) -> Result<()> {
    /// Guards, and a tensor with a history; some guards are dropped out of order at the end of the thread.
    #[allow(dead_code, reason = "guards are held, not read")]
    struct DropGuards(Vec<AnyGuard>, Tensor);
    impl Drop for DropGuards {
        fn drop(&mut self) {
            drop(self.0.drain(..4));
            drop((no_grad(), autocast(DType::BF16), scope::enter_op("last")));
            assert!(!is_fp8_enabled() && self.1.detach().narrow(0, 0, 1).is_ok());
        }
    }
    thread_local! {
        static HELD: RefCell<Option<DropGuards>> = const { RefCell::new(None) };
    }
    for early in [true, false] {
        let device = device.clone();
        let thread = std::thread::spawn(move || -> Result<()> {
            // Thread-locals are destroyed in the order of their first use, so both orders are tested.
            if early {
                HELD.set(None);
            }
            let side = Stream::new(&device);
            let w = Tensor::ones([4, 4], DType::F32, &device)?.to_leaf()?;
            let guards = (0..KINDS).map(|kind| enter(kind, &side)).collect::<Result<Vec<_>>>()?;
            {
                let _scope = autocast(DType::BF16)?;
                w.matmul(&w)?;
            }
            HELD.set(Some(DropGuards(guards, w)));
            Ok(())
        });
        // An abort would end the process.
        match thread.join() {
            Ok(done) => done?,
            Err(_) => anyhow::bail!("the thread ended with a panic"),
        }
    }
    Ok(())
}
