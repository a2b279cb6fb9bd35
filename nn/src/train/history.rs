//! Recorded metrics of a run.

use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::Result;
use crate::io::write_bytes;
use forebay_core::memory::{Stats, validation};

/// Losses, accuracies and memory of a run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct History {
    /// Loss of every step, the mean over its micro-batches.
    #[serde(with = "bits")]
    pub losses: Vec<f32>,
    /// Accuracy of every step up to the last one whose loss function returned one, NaN where it returned none.
    /// Empty if no step has one.
    #[serde(with = "bits")]
    pub accuracies: Vec<f32>,
    /// Samples of the device's memory.
    pub memory: Vec<MemoryPoint>,
    /// Losses of [`Trainer::validate`](super::Trainer::validate).
    #[serde(default)]
    pub validations: Vec<Validation>,
}

/// Loss on validation data.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Validation {
    /// Number of steps done.
    pub step: u64,
    /// Validation loss.
    #[serde(with = "bit")]
    pub loss: f32,
}

/// Device memory after a step, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryPoint {
    /// Number of steps done.
    #[serde(deserialize_with = "validation::deserialize_count")]
    pub step: u64,
    /// Bytes allocated by tensors.
    #[serde(deserialize_with = "validation::deserialize_bytes")]
    pub allocated: u64,
    /// Bytes reserved from the device.
    #[serde(deserialize_with = "validation::deserialize_bytes")]
    pub reserved: u64,
    /// Peak bytes allocated so far.
    #[serde(deserialize_with = "validation::deserialize_bytes")]
    pub peak: u64,
}

impl MemoryPoint {
    pub(super) fn new(step: u64, stats: &Stats) -> Self {
        Self { step, allocated: stats.allocated(), reserved: stats.reserved(), peak: stats.peak_allocated() }
    }
}

impl History {
    /// Returns the memory sample after `step` steps, if there is one.
    #[must_use]
    pub fn memory_after(&self, step: u64) -> Option<MemoryPoint> {
        self.memory.iter().copied().find(|point| point.step == step)
    }

    /// Writes a line for each step: `step,loss,accuracy,validation`, with enough digits to make the values
    /// exact. A step without an accuracy, or with NaN, has an empty field.
    pub fn write_csv(&self, path: impl AsRef<Path>) -> Result<()> {
        let mut text = String::from("step,loss,accuracy,validation\n");
        for (i, loss) in self.losses.iter().enumerate() {
            let step = i as u64 + 1;
            let accuracy =
                self.accuracies.get(i).filter(|a| !a.is_nan()).map(f32::to_string).unwrap_or_default();
            let validation = self.validations.iter().find(|v| v.step == step);
            let validation = validation.map(|v| v.loss.to_string()).unwrap_or_default();
            text.push_str(&format!("{step},{loss},{accuracy},{validation}\n"));
        }
        write_bytes(path, text)
    }
}

/// Serialisation of a float as its bits.
mod bit {
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    pub(super) fn serialize<S: Serializer>(value: &f32, to: S) -> Result<S::Ok, S::Error> {
        value.to_bits().serialize(to)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<f32, D::Error> {
        u32::deserialize(from).map(f32::from_bits)
    }
}

/// Serialisation of floats as their bits, because JSON has no NaN and a diverged run is saved too.
mod bits {
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    pub(super) fn serialize<S: Serializer>(values: &[f32], to: S) -> Result<S::Ok, S::Error> {
        values.iter().map(|v| v.to_bits()).collect::<Vec<u32>>().serialize(to)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<f32>, D::Error> {
        Ok(Vec::<u32>::deserialize(from)?.into_iter().map(f32::from_bits).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_history_with_nan_round_trips_through_json() -> Result<(), serde_json::Error> {
        let history = History {
            losses: vec![0.1, f32::NAN, f32::INFINITY],
            accuracies: vec![],
            memory: vec![MemoryPoint { step: 1, allocated: 2, reserved: 3, peak: 4 }],
            validations: vec![Validation { step: 1, loss: f32::INFINITY }],
        };
        let back: History = serde_json::from_str(&serde_json::to_string(&history)?)?;
        let bits = |h: &History| h.losses.iter().map(|l| l.to_bits()).collect::<Vec<_>>();
        assert_eq!((bits(&back), &back.memory), (bits(&history), &history.memory));
        assert_eq!(back.validations, history.validations);
        assert_eq!(back.memory_after(1).map(|m| m.peak), Some(4));
        Ok(())
    }
}
