//! Network that learns the classes of points, and the tensors around it.

use forebay::future::DeviceFuture;
use forebay::memory::Tag;
use forebay::memory::scope::enter_tag;
use forebay::prelude::*;
use forebay::wgpu;
use forebay::wgpu::util::DeviceExt;

pub(crate) const CLASSES: usize = 3;
/// Positions in one row of the grid, and rows.
pub(crate) const SIDE: usize = 64;
const LEARNING_RATE: f64 = 0.01;

/// Point of the plane, whose coordinates are from -1 to 1.
#[derive(Clone, Copy)]
pub(crate) struct Point {
    pub(crate) position: [f32; 2],
    pub(crate) class: u32,
}

#[derive(Module)]
struct Perceptron {
    input: Linear,
    hidden: Linear,
    output: Linear,
}

impl Perceptron {
    fn forward(&self, positions: &Tensor) -> Result<Tensor> {
        let x = self.input.forward(positions)?.silu()?;
        let x = self.hidden.forward(&x)?.silu()?;
        self.output.forward(&x)
    }
}

/// Perceptron with its optimiser and its data.
pub(crate) struct Classifier {
    net: Perceptron,
    optimizer: AdamW,
    /// Positions of the points, [points, 2].
    positions: Tensor,
    /// Classes of the points, [points].
    classes: Tensor,
    /// Positions of the grid, [SIDE * SIDE, 2].
    grid: Tensor,
}

impl Classifier {
    /// Creates a network with two hidden layers of `width` units.
    pub(crate) fn new(width: usize, points: &[Point], grid: &Tensor) -> Result<Self> {
        let device = grid.device();
        let net = Perceptron {
            input: Linear::new(2, width, device)?,
            hidden: Linear::new(width, width, device)?,
            output: Linear::new(width, CLASSES, device)?,
        };
        let optimizer = AdamW::new(net.parameters(), LEARNING_RATE);
        let (positions, classes) = upload(points, device)?;
        Ok(Self { net, optimizer, positions, classes, grid: grid.clone() })
    }

    /// Replaces the points.
    pub(crate) fn set_points(&mut self, points: &[Point]) -> Result<()> {
        (self.positions, self.classes) = upload(points, self.grid.device())?;
        Ok(())
    }

    /// Enqueues a training step on all points. The gradients stay until the next step.
    fn step(&mut self) -> Result<Tensor> {
        self.optimizer.zero_grad();
        let loss = self.net.forward(&self.positions)?.cross_entropy(&self.classes)?;
        loss.backward()?;
        self.optimizer.step()?;
        Ok(loss.detach())
    }

    /// Enqueues training steps, at least one. The future is the loss of the last one.
    pub(crate) fn train(&mut self, steps: u32) -> Result<DeviceFuture<f64>> {
        for _ in 1..steps {
            self.step()?;
        }
        Ok(self.step()?.item_async())
    }

    /// Enqueues the computation of the score of each class at each position of the grid, as
    /// [SIDE * SIDE, CLASSES].
    pub(crate) fn grid_scores(&self) -> Result<Tensor> {
        let _no_grad = no_grad();
        let _tag = enter_tag(Tag::Activation);
        self.net.forward(&self.grid)
    }
}

fn upload(points: &[Point], device: &Device) -> Result<(Tensor, Tensor)> {
    let _tag = enter_tag(Tag::Input);
    let positions = points.iter().flat_map(|point| point.position).collect::<Vec<f32>>();
    let classes = points.iter().map(|point| point.class).collect::<Vec<u32>>();
    Ok((
        Tensor::from_slice(&positions, [points.len(), 2], device)?,
        Tensor::from_slice(&classes, [points.len()], device)?,
    ))
}

/// Creates the positions of the grid, as a tensor over a buffer of the program.
pub(crate) fn create_grid(window: &wgpu::Device, device: &Device) -> Result<Tensor> {
    let coordinate = |index: usize| 2.0 * index as f32 / (SIDE - 1) as f32 - 1.0;
    let grid = (0..SIDE * SIDE).flat_map(|index| [coordinate(index % SIDE), coordinate(index / SIDE)]);
    let buffer = window.create_buffer_init(&wgpu::util::BufferInitDescriptor {
        label: Some("grid"),
        contents: &grid.flat_map(f32::to_ne_bytes).collect::<Vec<u8>>(),
        usage: wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_SRC | wgpu::BufferUsages::COPY_DST,
    });
    Tensor::from_wgpu_buffer(&buffer, 0, [SIDE * SIDE, 2], DType::F32, device)
}
