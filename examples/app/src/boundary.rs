//! Drawing of the boundary between classes, from the memory of the tensor with the scores.

use eframe::egui::{Color32, PaintCallback, PaintCallbackInfo, Rect};
use eframe::egui_wgpu::{Callback, CallbackResources, CallbackTrait, RenderState};
use forebay::prelude::*;
use forebay::wgpu::util::DeviceExt;
use forebay::{WgpuSlice, wgpu};

use crate::network::{CLASSES, SIDE};

/// Colours of the points, by class.
pub(crate) const COLORS: [Color32; CLASSES] =
    [Color32::from_rgb(74, 144, 245), Color32::from_rgb(245, 146, 62), Color32::from_rgb(64, 190, 128)];
/// Brightness of the areas, compared with the points.
const AREA_BRIGHTNESS: f32 = 0.5;

/// Returns the colour of an area in which the network is certain of the class.
pub(crate) fn area_color(class: usize) -> Color32 {
    Color32::BLACK.lerp_to_gamma(COLORS[class], AREA_BRIGHTNESS)
}

/// Pipeline that draws the boundary.
pub(crate) struct BoundaryPainter {
    window: wgpu::Device,
    pipeline: wgpu::RenderPipeline,
    colors: wgpu::Buffer,
}

impl BoundaryPainter {
    pub(crate) fn new(window: &RenderState) -> Self {
        let shader = window.device.create_shader_module(wgpu::include_wgsl!("boundary.wgsl"));
        let pipeline = window.device.create_render_pipeline(&wgpu::RenderPipelineDescriptor {
            label: Some("boundary"),
            layout: None,
            vertex: wgpu::VertexState {
                module: &shader,
                entry_point: Some("vertex_main"),
                buffers: &[],
                compilation_options: wgpu::PipelineCompilationOptions::default(),
            },
            fragment: Some(wgpu::FragmentState {
                module: &shader,
                entry_point: Some("fragment_main"),
                targets: &[Some(window.target_format.into())],
                compilation_options: wgpu::PipelineCompilationOptions {
                    constants: &[("side", SIDE as f64)],
                    ..Default::default()
                },
            }),
            primitive: wgpu::PrimitiveState::default(),
            depth_stencil: None,
            multisample: wgpu::MultisampleState::default(),
            multiview_mask: None,
            cache: None,
        });
        let colors = (0..CLASSES).flat_map(|class| area_color(class).to_normalized_gamma_f32());
        let colors = window.device.create_buffer_init(&wgpu::util::BufferInitDescriptor {
            label: Some("colors"),
            contents: &colors.flat_map(f32::to_ne_bytes).collect::<Vec<u8>>(),
            usage: wgpu::BufferUsages::UNIFORM,
        });
        Self { window: window.device.clone(), pipeline, colors }
    }

    /// Returns the boundary as a shape of egui. The shader reads the tensor's own buffer.
    pub(crate) fn paint(&self, rect: Rect, scores: &Tensor) -> Result<PaintCallback> {
        let memory = scores.wgpu_slice()?;
        let entry = |binding, resource| wgpu::BindGroupEntry { binding, resource };
        let bindings = self.window.create_bind_group(&wgpu::BindGroupDescriptor {
            label: Some("boundary"),
            layout: &self.pipeline.get_bind_group_layout(0),
            entries: &[entry(0, memory.as_binding()), entry(1, self.colors.as_entire_binding())],
        });
        let callback = BoundaryCallback { pipeline: self.pipeline.clone(), bindings, _memory: memory };
        Ok(Callback::new_paint_callback(rect, callback))
    }
}

/// Draws in egui's render pass.
struct BoundaryCallback {
    pipeline: wgpu::RenderPipeline,
    bindings: wgpu::BindGroup,
    /// Keeps the memory where it is. egui drops its shapes after it has submitted the pass.
    _memory: WgpuSlice,
}

impl CallbackTrait for BoundaryCallback {
    fn paint(&self, _: PaintCallbackInfo, pass: &mut wgpu::RenderPass<'static>, _: &CallbackResources) {
        pass.set_pipeline(&self.pipeline);
        pass.set_bind_group(0, &self.bindings, &[]);
        pass.draw(0..3, 0..1);
    }
}
