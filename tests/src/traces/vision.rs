//! Networks over pictures, and others of convolutions.

use super::program::{Block, Program};
use super::transformers::Adam;

/// A convolution: how many channels come out, and by how much a side becomes smaller.
type Stage = (u64, u64);

/// As ResNet-50's: four groups of bottlenecks.
fn bottlenecks() -> Vec<Stage> {
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

/// A chain of convolutions, each with a norm and an activation.
struct Convolutions {
    stages: Vec<Stage>,
    /// Bytes of an element of what flows.
    element: u64,
    channels: u64,
}

impl Convolutions {
    fn parameters(&self) -> Vec<u64> {
        let mut before = self.channels;
        let each = self.stages.iter().enumerate().flat_map(|(at, &(channels, _))| {
            let window = if at % 3 == 0 { 9 } else { 1 };
            let weight = channels * std::mem::replace(&mut before, channels) * window;
            [weight, channels, channels]
        });
        each.collect()
    }

    fn load(&self, p: &mut Program) -> Vec<Block> {
        let sizes = self.parameters();
        p.take_all(sizes.into_iter().map(|n| n * 4))
    }

    /// A library's choice of scratch memory, which depends on the shapes.
    fn workspace(p: &mut Program, bytes: u64) {
        let bytes = [bytes / 4, bytes / 2 + 4096, 2 << 20, 17 << 20][(bytes / 4096 % 4) as usize];
        p.scratch(bytes.max(512));
    }

    /// Forward; with `saved`, what the gradients need stays.
    fn forward(
        &self,
        p: &mut Program,
        batch: u64,
        side: u64,
        saved: Option<&mut Vec<(u64, Block)>>,
    ) -> Block {
        let (mut side, mut kept) = (side, Vec::new());
        let mut flow = p.take(batch * self.channels * side * side * self.element);
        for &(channels, step) in &self.stages {
            side = (side / step).max(1);
            let bytes = batch * channels * side * side * self.element;
            let convolved = p.take(bytes);
            Self::workspace(p, bytes);
            let sums = p.take_all([channels * 4, channels * 4]);
            let normed = p.take(bytes);
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

    /// Backward through what was saved. Gradients are appended.
    fn backward(
        &self,
        p: &mut Program,
        mut saved: Vec<(u64, Block)>,
        end: Block,
        gradients: &mut Vec<Block>,
    ) {
        let mut flow = end;
        for n in self.parameters().chunks(3).rev() {
            let at = saved.len() - 4;
            let of = saved.split_off(at);
            let bytes = of[0].0;
            gradients.extend(p.take_all([n[1] * 4, n[2] * 4]));
            p.next(&mut flow, bytes);
            Self::workspace(p, bytes);
            gradients.push(p.take(n[0] * 4));
            Self::workspace(p, bytes / 2);
            p.next(&mut flow, bytes);
            p.free(of.into_iter().map(|(_, block)| block));
        }
        p.free([flow]);
    }

    fn step(&self, p: &mut Program, batch: u64, side: u64, adam: &mut Adam) {
        let (mut saved, mut gradients) = (Vec::new(), Vec::new());
        let end = self.forward(p, batch, side, Some(&mut saved));
        self.backward(p, saved, end, &mut gradients);
        adam.step(p, &self.parameters(), false);
        p.free(gradients);
    }
}

fn resnet() -> Convolutions {
    Convolutions { stages: bottlenecks(), element: 2, channels: 3 }
}

/// Batches that grow until they are as large as they may be, and a smaller last one in each epoch.
pub(super) fn growing_batches(p: &mut Program) {
    let (net, mut adam) = (resnet(), Adam::default());
    let _held = net.load(p);
    for batch in [2, 4, 8, 16, 32, 48, 64, 96, 96, 96, 37, 96, 96, 37] {
        net.step(p, batch, 224, &mut adam);
    }
}

/// Sides that change every few steps.
pub(super) fn sizes(p: &mut Program) {
    let (net, mut adam) = (resnet(), Adam::default());
    let _held = net.load(p);
    for _ in 0..6 {
        let side = 32 * p.any(6, 16);
        for _ in 0..3 {
            net.step(p, 16, side, &mut adam);
        }
    }
}

/// Trainings with an evaluation in other batches, and a moving average of the weights.
pub(super) fn evaluated(p: &mut Program) {
    let (net, mut adam) = (Convolutions { element: 4, ..resnet() }, Adam::default());
    let _held = (net.load(p), net.load(p));
    for _ in 0..3 {
        for _ in 0..4 {
            net.step(p, 32, 224, &mut adam);
        }
        for batch in [128, 128, 128, 19] {
            let flow = net.forward(p, batch, 224, None);
            p.free([flow]);
        }
    }
}

/// Batches of any size, answered without gradients.
pub(super) fn answered(p: &mut Program) {
    let net = resnet();
    let _held = net.load(p);
    for _ in 0..60 {
        let batch = p.any(1, 256);
        let flow = net.forward(p, batch, 224, None);
        p.free([flow]);
    }
}

/// Found things: as many as there are in a picture, with a mask each.
pub(super) fn detection(p: &mut Program) {
    let (net, mut adam) = (Convolutions { element: 4, ..resnet() }, Adam::default());
    let _held = net.load(p);
    for _ in 0..10 {
        let side = 32 * p.any(12, 20);
        let (mut saved, mut gradients) = (Vec::new(), Vec::new());
        let end = net.forward(p, 4, side, Some(&mut saved));
        let mut found = Vec::new();
        for _ in 0..4 {
            let boxes = p.any(200, 2000);
            let pairs = p.take_all([boxes * 16, boxes * 4, boxes * boxes * 4]);
            p.scratch(boxes * boxes);
            let kept = p.any(1, 512);
            found.extend(p.take_all([kept * 16, kept * 256 * 49 * 4, kept * 1024 * 4]));
            p.free(pairs);
            let masks = p.any(1, 64);
            found.extend(p.take_all([masks * 256 * 196 * 4, masks * 256 * 784 * 4, masks * 80 * 784 * 4]));
        }
        p.scratch(64 << 20);
        p.free(found);
        net.backward(p, saved, end, &mut gradients);
        adam.step(p, &net.parameters(), false);
        p.free(gradients);
    }
}

/// A network with a way down and a way up: what the way down keeps is freed last.
fn hourglass(p: &mut Program, batch: u64, side: u64, width: u64, dimensions: u32) {
    let size = |level: u64| batch * (width << level) * (side >> level).pow(dimensions) * 2;
    let mut down = Vec::new();
    let mut flow = p.take(size(0));
    for level in 0..5 {
        down.push(p.take_all([size(level); 3]));
        p.scratch(size(level) / 2);
        p.next(&mut flow, size(level) / 4);
    }
    let mut up = Vec::new();
    for level in (0..5).rev() {
        let joined = p.take(2 * size(level));
        up.push((level, vec![joined, p.take(size(level)), p.take(size(level))]));
        p.next(&mut flow, size(level));
    }
    while let Some((level, kept)) = up.pop() {
        p.next(&mut flow, 2 * size(level));
        p.scratch((width << level).pow(2) * 9 * 4);
        p.free(kept);
    }
    for (level, kept) in down.into_iter().enumerate().rev() {
        p.next(&mut flow, size(level as u64));
        p.scratch(size(level as u64));
        p.free(kept);
    }
    p.free([flow]);
}

/// Volumes cut to patches of any size.
pub(super) fn volumes(p: &mut Program) {
    let _held = p.take_all((0..5_u64).flat_map(|level| [(32 << level) * (32 << level) * 27 * 4; 8]));
    for _ in 0..60 {
        let side = 16 * p.any(4, 9);
        hourglass(p, 2, side, 32, 3);
    }
}

/// Denoising: steps of a training, then pictures made in many steps without gradients.
pub(super) fn denoising(p: &mut Program) {
    let _held = p.take_all((0..5_u64).flat_map(|level| [(128 << level) * (128 << level) * 9 * 4; 6]));
    for _ in 0..4 {
        for _ in 0..8 {
            hourglass(p, 16, 64, 128, 2);
        }
        let batch = p.any(4, 64);
        let mut picture = p.take(batch * 4 * 64 * 64 * 4);
        for _ in 0..20 {
            let mut flow = p.take(batch * 128 * 64 * 64 * 2);
            for level in [0, 1, 2, 3, 2, 1, 0_u64] {
                let bytes = batch * (128 << level) * (64_u64 >> level).pow(2) * 2;
                p.scratch(bytes);
                p.next(&mut flow, bytes);
            }
            p.free([flow]);
            p.next(&mut picture, batch * 4 * 64 * 64 * 4);
        }
        p.next(&mut picture, batch * 3 * 512 * 512 * 4);
        p.scratch(batch * 128 * 256 * 256 * 2);
        p.free([picture]);
    }
}

/// Two networks that are trained in turn, one through the other.
pub(super) fn adversaries(p: &mut Program) {
    let maker = Convolutions {
        stages: vec![(1024, 1), (512, 1), (256, 1), (128, 1), (64, 1), (3, 1)],
        element: 4,
        channels: 128,
    };
    let judge = Convolutions {
        stages: vec![(64, 2), (128, 2), (256, 2), (512, 2), (512, 1), (1, 1)],
        element: 4,
        channels: 3,
    };
    let _held = (maker.load(p), judge.load(p));
    let (mut of_maker, mut of_judge) = (Adam::default(), Adam::default());
    for step in 0..70 {
        let batch = if step % 7 == 6 { p.any(5, 31) } else { 32 };
        for _ in 0..2 {
            let made = maker.forward(p, batch, 32, None);
            judge.step(p, batch, 128, &mut of_judge);
            judge.step(p, batch, 128, &mut of_judge);
            p.free([made]);
        }
        let (mut saved, mut judged, mut gradients) = (Vec::new(), Vec::new(), Vec::new());
        let made = maker.forward(p, batch, 32, Some(&mut saved));
        let end = judge.forward(p, batch, 128, Some(&mut judged));
        judge.backward(p, judged, end, &mut gradients);
        maker.backward(p, saved, made, &mut gradients);
        of_maker.step(p, &maker.parameters(), false);
        p.free(gradients);
    }
}

/// The first step tries ways to convolve, with scratch memory as large as it can be; later ones use what was found.
pub(super) fn tried_out(p: &mut Program) {
    let (net, mut adam) = (resnet(), Adam::default());
    let _held = net.load(p);
    for at in 0..net.stages.len() as u64 {
        let bytes = 64 * 64 * 112 * 112;
        let held = p.take_all([bytes >> (at / 13), bytes >> (at / 13)]);
        for way in 1..5 {
            p.scratch((bytes >> (at / 13)) * way + (at << 20));
        }
        p.free(held);
    }
    for batch in [64, 64, 64, 64, 64, 13] {
        net.step(p, batch, 224, &mut adam);
    }
}
