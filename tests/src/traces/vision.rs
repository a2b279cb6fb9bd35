//! Synthetic workloads: convolutional networks.

use super::trace_builder::{BlockId, TraceBuilder};
use super::transformers::SimulatedAdam;

/// Convolution: output channels and stride.
type ConvStage = (u64, u64);

/// Returns the stages of ResNet-50: four groups of bottlenecks.
fn bottlenecks() -> Vec<ConvStage> {
    let mut stages = vec![(64, 2), (64, 2)];
    for (group, count) in [3, 4, 6, 3].into_iter().enumerate() {
        let width = 64 << group;
        for block in 0..count {
            let step = if group > 0 && block == 0 { 2 } else { 1 };
            stages.extend([(width, 1), (width, step), (4 * width, 1)]);
        }
    }
    stages
}

/// Chain of convolutions, each with batch norm and activation.
struct ConvNetShape {
    stages: Vec<ConvStage>,
    /// Bytes of an activation element.
    element_size: u64,
    channels: u64,
}

impl ConvNetShape {
    fn param_numels(&self) -> Vec<u64> {
        let mut before = self.channels;
        let each = self.stages.iter().enumerate().flat_map(|(at, &(channels, _))| {
            let window = if at % 3 == 0 { 9 } else { 1 };
            let weight = channels * std::mem::replace(&mut before, channels) * window;
            [weight, channels, channels]
        });
        each.collect()
    }

    fn alloc_parameters(&self, p: &mut TraceBuilder) -> Vec<BlockId> {
        let sizes = self.param_numels();
        p.alloc_all(sizes.into_iter().map(|n| n * 4))
    }

    /// Allocates and frees a library's workspace, whose size depends on the shapes.
    fn alloc_workspace(p: &mut TraceBuilder, bytes: u64) {
        let bytes = [bytes / 4, bytes / 2 + 4096, 2 << 20, 17 << 20][(bytes / 4096 % 4) as usize];
        p.alloc_scratch(bytes.max(512));
    }

    /// Runs forward; with `saved`, keeps activations for the backward pass.
    fn forward(
        &self,
        p: &mut TraceBuilder,
        batch: u64,
        side: u64,
        saved: Option<&mut Vec<(u64, BlockId)>>,
    ) -> BlockId {
        let (mut side, mut kept) = (side, Vec::new());
        let mut flow = p.alloc(batch * self.channels * side * side * self.element_size);
        for &(channels, step) in &self.stages {
            side = (side / step).max(1);
            let bytes = batch * channels * side * side * self.element_size;
            let convolved = p.alloc(bytes);
            Self::alloc_workspace(p, bytes);
            let sums = p.alloc_all([channels * 4, channels * 4]);
            let normed = p.alloc(bytes);
            match saved {
                Some(_) => {
                    kept.extend([(bytes, std::mem::replace(&mut flow, normed)), (bytes, convolved)]);
                    kept.extend(sums.into_iter().map(|b| (channels * 4, b)));
                }
                None => {
                    p.free(sums);
                    p.free([convolved, std::mem::replace(&mut flow, normed)]);
                }
            }
        }
        if let Some(saved) = saved {
            saved.extend(kept);
        }
        flow
    }

    /// Runs backward through the saved activations, and appends the gradients.
    fn backward(
        &self,
        p: &mut TraceBuilder,
        mut saved: Vec<(u64, BlockId)>,
        end: BlockId,
        gradients: &mut Vec<BlockId>,
    ) {
        let mut flow = end;
        for n in self.param_numels().chunks(3).rev() {
            let at = saved.len() - 4;
            let of = saved.split_off(at);
            let bytes = of[0].0;
            gradients.extend(p.alloc_all([n[1] * 4, n[2] * 4]));
            p.replace_block(&mut flow, bytes);
            Self::alloc_workspace(p, bytes);
            gradients.push(p.alloc(n[0] * 4));
            Self::alloc_workspace(p, bytes / 2);
            p.replace_block(&mut flow, bytes);
            p.free(of.into_iter().map(|(_, block)| block));
        }
        p.free([flow]);
    }

    fn train_step(&self, p: &mut TraceBuilder, batch: u64, side: u64, adam: &mut SimulatedAdam) {
        let (mut saved, mut gradients) = (Vec::new(), Vec::new());
        let end = self.forward(p, batch, side, Some(&mut saved));
        self.backward(p, saved, end, &mut gradients);
        adam.step(p, &self.param_numels(), false);
        p.free(gradients);
    }
}

fn resnet() -> ConvNetShape {
    ConvNetShape { stages: bottlenecks(), element_size: 2, channels: 3 }
}

/// Batch sizes that grow to a maximum, and a smaller last batch in each epoch.
pub(super) fn growing_batches(p: &mut TraceBuilder) {
    let (net, mut adam) = (resnet(), SimulatedAdam::default());
    let _held = net.alloc_parameters(p);
    for batch in [2, 4, 8, 16, 32, 48, 64, 96, 96, 96, 37, 96, 96, 37] {
        net.train_step(p, batch, 224, &mut adam);
    }
}

/// Image sizes that change every few steps.
pub(super) fn sizes(p: &mut TraceBuilder) {
    let (net, mut adam) = (resnet(), SimulatedAdam::default());
    let _held = net.alloc_parameters(p);
    for _ in 0..6 {
        let side = 32 * p.rand_range(6, 16);
        for _ in 0..3 {
            net.train_step(p, 16, side, &mut adam);
        }
    }
}

/// Training with evaluation in other batch sizes, and a moving average of the weights.
pub(super) fn evaluation(p: &mut TraceBuilder) {
    let (net, mut adam) = (ConvNetShape { element_size: 4, ..resnet() }, SimulatedAdam::default());
    let _held = (net.alloc_parameters(p), net.alloc_parameters(p));
    for _ in 0..3 {
        for _ in 0..4 {
            net.train_step(p, 32, 224, &mut adam);
        }
        for batch in [128, 128, 128, 19] {
            let flow = net.forward(p, batch, 224, None);
            p.free([flow]);
        }
    }
}

/// Inference with varying batch sizes.
pub(super) fn inference(p: &mut TraceBuilder) {
    let net = resnet();
    let _held = net.alloc_parameters(p);
    for _ in 0..60 {
        let batch = p.rand_range(1, 256);
        let flow = net.forward(p, batch, 224, None);
        p.free([flow]);
    }
}

/// Object detection: a varying number of objects in an image, with a mask each.
pub(super) fn detection(p: &mut TraceBuilder) {
    let (net, mut adam) = (ConvNetShape { element_size: 4, ..resnet() }, SimulatedAdam::default());
    let _held = net.alloc_parameters(p);
    for _ in 0..10 {
        let side = 32 * p.rand_range(12, 20);
        let (mut saved, mut gradients) = (Vec::new(), Vec::new());
        let end = net.forward(p, 4, side, Some(&mut saved));
        let mut found = Vec::new();
        for _ in 0..4 {
            let boxes = p.rand_range(200, 2000);
            let pairs = p.alloc_all([boxes * 16, boxes * 4, boxes * boxes * 4]);
            p.alloc_scratch(boxes * boxes);
            let kept = p.rand_range(1, 512);
            found.extend(p.alloc_all([kept * 16, kept * 256 * 49 * 4, kept * 1024 * 4]));
            p.free(pairs);
            let masks = p.rand_range(1, 64);
            found.extend(p.alloc_all([masks * 256 * 196 * 4, masks * 256 * 784 * 4, masks * 80 * 784 * 4]));
        }
        p.alloc_scratch(64 << 20);
        p.free(found);
        net.backward(p, saved, end, &mut gradients);
        adam.step(p, &net.param_numels(), false);
        p.free(gradients);
    }
}

/// U-Net: activations of the downward path are freed last.
fn unet(p: &mut TraceBuilder, batch: u64, side: u64, width: u64, dimensions: u32) {
    let size = |level: u64| batch * (width << level) * (side >> level).pow(dimensions) * 2;
    let mut down = Vec::new();
    let mut flow = p.alloc(size(0));
    for level in 0..5 {
        down.push(p.alloc_all([size(level); 3]));
        p.alloc_scratch(size(level) / 2);
        p.replace_block(&mut flow, size(level) / 4);
    }
    let mut up = Vec::new();
    for level in (0..5).rev() {
        let joined = p.alloc(2 * size(level));
        up.push((level, vec![joined, p.alloc(size(level)), p.alloc(size(level))]));
        p.replace_block(&mut flow, size(level));
    }
    while let Some((level, kept)) = up.pop() {
        p.replace_block(&mut flow, 2 * size(level));
        p.alloc_scratch((width << level).pow(2) * 9 * 4);
        p.free(kept);
    }
    for (level, kept) in down.into_iter().enumerate().rev() {
        p.replace_block(&mut flow, size(level as u64));
        p.alloc_scratch(size(level as u64));
        p.free(kept);
    }
    p.free([flow]);
}

/// Volumes, cut to patches of varying size.
pub(super) fn volumes(p: &mut TraceBuilder) {
    let _held = p.alloc_all((0..5_u64).flat_map(|level| [(32 << level) * (32 << level) * 27 * 4; 8]));
    for _ in 0..60 {
        let side = 16 * p.rand_range(4, 9);
        unet(p, 2, side, 32, 3);
    }
}

/// Diffusion: training steps, then sampling in many steps without gradients.
pub(super) fn diffusion(p: &mut TraceBuilder) {
    let _held = p.alloc_all((0..5_u64).flat_map(|level| [(128 << level) * (128 << level) * 9 * 4; 6]));
    for _ in 0..4 {
        for _ in 0..8 {
            unet(p, 16, 64, 128, 2);
        }
        let batch = p.rand_range(4, 64);
        let mut picture = p.alloc(batch * 4 * 64 * 64 * 4);
        for _ in 0..20 {
            let mut flow = p.alloc(batch * 128 * 64 * 64 * 2);
            for level in [0, 1, 2, 3, 2, 1, 0_u64] {
                let bytes = batch * (128 << level) * (64_u64 >> level).pow(2) * 2;
                p.alloc_scratch(bytes);
                p.replace_block(&mut flow, bytes);
            }
            p.free([flow]);
            p.replace_block(&mut picture, batch * 4 * 64 * 64 * 4);
        }
        p.replace_block(&mut picture, batch * 3 * 512 * 512 * 4);
        p.alloc_scratch(batch * 128 * 256 * 256 * 2);
        p.free([picture]);
    }
}

/// GAN: two networks that are trained in turn, one through the other.
pub(super) fn gan(p: &mut TraceBuilder) {
    let maker = ConvNetShape {
        stages: vec![(1024, 1), (512, 1), (256, 1), (128, 1), (64, 1), (3, 1)],
        element_size: 4,
        channels: 128,
    };
    let judge = ConvNetShape {
        stages: vec![(64, 2), (128, 2), (256, 2), (512, 2), (512, 1), (1, 1)],
        element_size: 4,
        channels: 3,
    };
    let _held = (maker.alloc_parameters(p), judge.alloc_parameters(p));
    let (mut of_maker, mut of_judge) = (SimulatedAdam::default(), SimulatedAdam::default());
    for step in 0..70 {
        let batch = if step % 7 == 6 { p.rand_range(5, 31) } else { 32 };
        for _ in 0..2 {
            let made = maker.forward(p, batch, 32, None);
            judge.train_step(p, batch, 128, &mut of_judge);
            judge.train_step(p, batch, 128, &mut of_judge);
            p.free([made]);
        }
        let (mut saved, mut judged, mut gradients) = (Vec::new(), Vec::new(), Vec::new());
        let made = maker.forward(p, batch, 32, Some(&mut saved));
        let end = judge.forward(p, batch, 128, Some(&mut judged));
        judge.backward(p, judged, end, &mut gradients);
        maker.backward(p, saved, made, &mut gradients);
        of_maker.step(p, &maker.param_numels(), false);
        p.free(gradients);
    }
}

/// Autotuning: the first step tries convolution algorithms with large workspaces, later steps use the best.
pub(super) fn autotuning(p: &mut TraceBuilder) {
    let (net, mut adam) = (resnet(), SimulatedAdam::default());
    let _held = net.alloc_parameters(p);
    for at in 0..net.stages.len() as u64 {
        let bytes = 64 * 64 * 112 * 112;
        let held = p.alloc_all([bytes >> (at / 13), bytes >> (at / 13)]);
        for way in 1..5 {
            p.alloc_scratch((bytes >> (at / 13)) * way + (at << 20));
        }
        p.free(held);
    }
    for batch in [64, 64, 64, 64, 64, 13] {
        net.train_step(p, batch, 224, &mut adam);
    }
}
