//! What a run recorded.

use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::io::write_bytes;
use forebay_core::error::Result;
use forebay_core::memory::{Stats, validation};

/// Losses, accuracies and memory of a run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct History {
    /// The loss of every step; the mean over its micro-batches.
    #[serde(with = "bits")]
    pub losses: Vec<f32>,
    /// The accuracy of every step, where the loss came with one.
    #[serde(with = "bits")]
    pub accuracies: Vec<f32>,
    /// The device's memory, now and then.
    pub memory: Vec<MemoryPoint>,
    /// What [`Trainer::validate`](super::Trainer::validate) found, after which steps.
    #[serde(default)]
    pub validations: Vec<Validation>,
}

/// The loss on data that is not trained on.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Validation {
    /// Steps done.
    pub step: u64,
    /// The loss.
    #[serde(with = "bit")]
    pub loss: f32,
}

/// The memory that a device held after a step, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryPoint {
    /// Steps done.
    #[serde(deserialize_with = "validation::deserialize_count")]
    pub step: u64,
    /// Held by tensors.
    #[serde(deserialize_with = "validation::deserialize_bytes")]
    pub allocated: u64,
    /// Taken from the device.
    #[serde(deserialize_with = "validation::deserialize_bytes")]
    pub reserved: u64,
    /// The most that tensors held so far.
    #[serde(deserialize_with = "validation::deserialize_bytes")]
    pub peak: u64,
}

impl MemoryPoint {
    pub(super) fn new(step: u64, stats: &Stats) -> Self {
        Self { step, allocated: stats.allocated(), reserved: stats.reserved(), peak: stats.peak_allocated() }
    }
}

impl History {
    /// The memory after `step` steps, if it was looked at then.
    #[must_use]
    pub fn memory_after(&self, step: u64) -> Option<MemoryPoint> {
        self.memory.iter().copied().find(|point| point.step == step)
    }

    /// Writes a line for each step: `step,loss,accuracy,validation`, with as many digits as make the numbers exact.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn write_csv(&self, path: impl AsRef<Path>) -> Result<()> {
        let mut text = String::from("step,loss,accuracy,validation\n");
        for (i, loss) in self.losses.iter().enumerate() {
            let step = i as u64 + 1;
            let accuracy = self.accuracies.get(i).map(f32::to_string).unwrap_or_default();
            let found = self.validations.iter().find(|v| v.step == step);
            let validation = found.map(|v| v.loss.to_string()).unwrap_or_default();
            text.push_str(&format!("{step},{loss},{accuracy},{validation}\n"));
        }
        write_bytes(path, text)
    }
}

/// One float as its bits.
mod bit {
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    pub(super) fn serialize<S: Serializer>(value: &f32, to: S) -> Result<S::Ok, S::Error> {
        value.to_bits().serialize(to)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<f32, D::Error> {
        u32::deserialize(from).map(f32::from_bits)
    }
}

/// Floats as their bits: JSON has no NaN, and a run that diverged is saved too.
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
    fn a_history_with_nan_comes_back_from_json_bit_for_bit() -> Result<(), serde_json::Error> {
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
