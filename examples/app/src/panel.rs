//! The panel: choices of the user, the loss, and the memory by purpose.

use eframe::egui::{self, Align2, Color32, FontId, Rect, RichText, Sense, Slider, Stroke, Ui, pos2, vec2};
use forebay::memory::{Bytes, Tag};

use crate::app::{App, Example, MIB};
use crate::boundary::COLORS;

const WIDTHS: [usize; 5] = [8, 16, 64, 256, 1024];
const CLASS_NAMES: [&str; 3] = ["Blue", "Orange", "Green"];
/// Purposes of memory, in the order of the panel.
const TAGS: [(Tag, &str); 6] = [
    (Tag::Parameter, "Parameters"),
    (Tag::Gradient, "Gradients"),
    (Tag::OptimizerState, "Optimiser"),
    (Tag::Activation, "Activations"),
    (Tag::Input, "Points"),
    (Tag::External, "Window's own"),
];
const BAR_COLOR: Color32 = Color32::from_rgb(88, 112, 150);
const OVER_BUDGET_COLOR: Color32 = Color32::from_rgb(190, 70, 60);

impl App {
    /// Shows the panel, and returns the rectangle of the slider.
    pub(crate) fn show_panel(&mut self, ui: &mut Ui) -> Rect {
        ui.heading("A boundary that learns");
        ui.weak("Click or drag in the plane to add points.");
        ui.add_space(10.0);
        self.show_points(ui);
        ui.add_space(6.0);
        self.show_network(ui);
        let loss = self.training.losses.last().map(|loss| format!("{loss:.4}")).unwrap_or_default();
        section(ui, &format!("Loss {loss}"));
        self.show_loss(ui);
        section(ui, "Memory");
        let slider = self.show_memory(ui);
        ui.with_layout(egui::Layout::bottom_up(egui::Align::Min), |ui| {
            ui.add(egui::Label::new(RichText::new(&self.device.info().name).weak()).truncate());
        });
        slider
    }

    fn show_points(&mut self, ui: &mut Ui) {
        ui.horizontal(|ui| {
            for (class, name) in CLASS_NAMES.into_iter().enumerate() {
                let name = RichText::new(name).color(COLORS[class]).strong();
                ui.selectable_value(&mut self.settings.class, class, name);
            }
        });
        ui.horizontal(|ui| {
            for (name, points) in [
                ("Spirals", Example::Spirals.points()),
                ("Rings", Example::Rings.points()),
                ("Clear", Vec::new()),
            ] {
                if ui.button(name).clicked() {
                    self.replace_points(points);
                }
            }
        });
    }

    fn show_network(&mut self, ui: &mut Ui) {
        ui.horizontal(|ui| {
            let width = self.settings.width;
            egui::ComboBox::from_id_salt("width")
                .selected_text(format!("{width} units"))
                .width(110.0)
                .show_ui(ui, |ui| {
                    for width in WIDTHS {
                        ui.selectable_value(&mut self.settings.width, width, format!("{width} units"));
                    }
                });
            let is_changed = self.settings.width != width;
            if ui.button("Restart").clicked() || is_changed {
                self.restart();
            }
            ui.checkbox(&mut self.settings.is_training, "Train");
        });
    }

    fn show_loss(&self, ui: &mut Ui) {
        let losses = &self.training.losses;
        let (plot, _) = ui.allocate_exact_size(vec2(ui.available_width(), 80.0), Sense::hover());
        let painter = ui.painter_at(plot);
        painter.rect_filled(plot, 3.0, Color32::from_gray(20));
        // The scale is logarithmic, over a factor of 1,000 or more.
        let lowest = losses.iter().copied().fold(1e-3, f64::min).max(1e-9).ln();
        let highest = losses.iter().copied().fold(1.0, f64::max).ln();
        let inner = plot.shrink(6.0);
        let line = losses.iter().enumerate().map(|(index, loss)| {
            let x = index as f32 / losses.len().saturating_sub(1).max(1) as f32;
            let y = ((highest - loss.max(1e-9).ln()) / (highest - lowest)) as f32;
            pos2(inner.left() + x * inner.width(), inner.top() + y * inner.height())
        });
        painter.line(line.collect(), Stroke::new(1.5, Color32::from_rgb(120, 190, 250)));
        ui.label(format!(
            "step {}, {:.1} steps/s, {:.1} frames/s",
            self.training.steps, self.rates.steps_per_second, self.rates.frames_per_second
        ));
    }

    /// Shows the memory in use, and returns the rectangle of the slider.
    fn show_memory(&mut self, ui: &mut Ui) -> Rect {
        ui.spacing_mut().slider_width = 150.0;
        let slider =
            Slider::new(&mut self.settings.budget_mib, 1..=256).logarithmic(true).suffix(" MiB budget");
        let slider = ui.add(slider);
        if slider.changed() {
            self.apply_budget();
        }
        let budget = self.settings.budget_mib * MIB;
        let reserved = self.memory.reserved();
        show_bar(ui, "Reserved", reserved, budget);
        ui.add_space(4.0);
        let peaks = TAGS.map(|(tag, name)| (name, self.memory.tag(tag).peak));
        let largest = peaks.iter().map(|(_, peak)| *peak).max().unwrap_or_default();
        for (name, peak) in peaks {
            show_bar(ui, name, peak, largest);
        }
        Rect::from_min_size(slider.rect.min, vec2(150.0, slider.rect.height()))
    }
}

fn section(ui: &mut Ui, title: &str) {
    ui.add_space(14.0);
    ui.label(RichText::new(title).strong().size(15.0));
    ui.add_space(2.0);
}

/// Shows bytes as a bar, whose full length is `full`.
fn show_bar(ui: &mut Ui, name: &str, bytes: u64, full: u64) {
    let (row, _) = ui.allocate_exact_size(vec2(ui.available_width(), 18.0), Sense::hover());
    let (left, right) = (row.left() + 92.0, row.right() - 72.0);
    let track = Rect::from_min_max(pos2(left, row.top() + 4.0), pos2(right, row.bottom() - 4.0));
    let part = (bytes as f32 / full.max(1) as f32).min(1.0);
    let filled = Rect::from_min_size(track.min, vec2(part * track.width(), track.height()));
    let painter = ui.painter();
    painter.rect_filled(track, 2.0, Color32::from_gray(20));
    painter.rect_filled(filled, 2.0, if bytes > full { OVER_BUDGET_COLOR } else { BAR_COLOR });
    let (font, color) = (FontId::proportional(13.0), ui.visuals().text_color());
    painter.text(row.left_center(), Align2::LEFT_CENTER, name, font.clone(), color);
    painter.text(row.right_center(), Align2::RIGHT_CENTER, Bytes(bytes).to_string(), font, color);
}
