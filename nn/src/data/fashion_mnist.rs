//! Fashion-MNIST: 28 x 28 greyscale images of clothes in ten classes.

use std::path::{Path, PathBuf};

use super::{Dataset, locate};
use crate::io::{idx, idx::IdxArray};
use crate::{Result, fail, fail_if};

const SIDE: usize = 28;

/// Subset embedded in the library, for machines without the data set.
macro_rules! embedded_files {
    ($part:literal) => {
        [
            include_bytes!(concat!("../../data/fashion-small/", $part, "-images-idx3-ubyte.gz")).as_slice(),
            include_bytes!(concat!("../../data/fashion-small/", $part, "-labels-idx1-ubyte.gz")).as_slice(),
        ]
    };
}
/// Folder name of the embedded subset.
const EMBEDDED_PATH: &str = "<built into forebay>";

/// Images of Fashion-MNIST, normalised to mean 0 and standard deviation 1, with their classes.
///
/// The search covers the folder that `FOREBAY_DATA` names, `/usr/share/datasets/fashion-mnist` (Debian's
/// package `dataset-fashion-mnist`), and the project's `.forebay/data`. If these lack the files and
/// `FOREBAY_DATA` is not set, a small subset embedded in the library is used (1.9 MB of the program).
///
/// On other systems, download four files from <https://github.com/zalandoresearch/fashion-mnist>:
/// `train-images-idx3-ubyte.gz`, `train-labels-idx1-ubyte.gz`, `t10k-images-idx3-ubyte.gz` and
/// `t10k-labels-idx1-ubyte.gz`. Put them into one folder, and set `FOREBAY_DATA` to it.
#[derive(Clone, Debug)]
pub struct FashionMnist {
    folder: PathBuf,
    sample_shape: Vec<usize>,
    pixels: Vec<u8>,
    labels: Vec<u8>,
    /// Normalised value of every pixel value.
    normalized_values: Vec<f32>,
}

impl FashionMnist {
    /// Names of the classes.
    pub const CLASSES: [&str; 10] = [
        "T-shirt",
        "trouser",
        "pullover",
        "dress",
        "coat",
        "sandal",
        "shirt",
        "sneaker",
        "bag",
        "ankle boot",
    ];

    /// Mean of the training images' pixels, scaled to 0..=1.
    pub const MEAN: f32 = 0.286;
    /// Standard deviation of the training images' pixels, scaled to 0..=1.
    pub const STD: f32 = 0.353;

    /// Loads the training images: 60,000, or 3,300 of the embedded subset.
    ///
    /// # Errors
    /// `FOREBAY_DATA` is set and the files are not found, or a file is damaged. The message lists the folders
    /// that were searched.
    pub fn train() -> Result<Self> {
        Self::load_split("train")
    }

    /// Loads the test images like [`train`](Self::train): 10,000, or 1,000 of the embedded subset.
    pub fn test() -> Result<Self> {
        Self::load_split("t10k")
    }

    fn load_split(part: &str) -> Result<Self> {
        let packed = format!("{part}-images-idx3-ubyte.gz");
        let advice = "FOREBAY_DATA names a folder with train-images-idx3-ubyte.gz, train-labels-idx1-ubyte.gz, \
                      t10k-images-idx3-ubyte.gz and t10k-labels-idx1-ubyte.gz (gzipped or not), from Debian's package \
                      `dataset-fashion-mnist` or https://github.com/zalandoresearch/fashion-mnist; without the \
                      variable, the embedded subset is used";
        let files = [packed.as_str(), packed.trim_end_matches(".gz")];
        match locate::find_file(&files, &["fashion-mnist"], advice) {
            Ok(path) => Self::open(path.parent().unwrap_or(Path::new(".")), part),
            Err(error) if locate::folder_from_env().is_some() => Err(error),
            Err(_) => {
                log::info!("Fashion-MNIST is not installed: the embedded subset is used");
                Self::load_embedded(part)
            }
        }
    }

    fn load_embedded(part: &str) -> Result<Self> {
        let [pixels, labels] =
            if part == "train" { embedded_files!("train") } else { embedded_files!("t10k") };
        let path = Path::new(EMBEDDED_PATH).to_owned();
        Self::new(path.clone(), (idx::from_bytes(pixels)?, path.clone()), (idx::from_bytes(labels)?, path))
    }

    /// Loads one split, `train` or `t10k`, from a folder of files under their original names, gzipped or not.
    /// MNIST's files have the same names and format.
    ///
    /// # Errors
    /// A file is missing or damaged.
    pub fn open(folder: impl AsRef<Path>, part: &str) -> Result<Self> {
        let folder = folder.as_ref();
        let load = |what: &str| {
            let plain = folder.join(format!("{part}-{what}-ubyte"));
            let path = if plain.is_file() { plain } else { folder.join(format!("{part}-{what}-ubyte.gz")) };
            idx::load(&path).map(|array| (array, path))
        };
        Self::new(folder.to_owned(), load("images-idx3")?, load("labels-idx1")?)
    }

    /// Checks two arrays, each with the path of its file.
    #[track_caller]
    fn new(
        folder: PathBuf,
        (pixels, path): (IdxArray, PathBuf),
        labels: (IdxArray, PathBuf),
    ) -> Result<Self> {
        let shape = &pixels.shape;
        fail_if!(shape.len() != 3 || shape[1..] != [SIDE, SIDE];
            file(path), "has the shape {shape:?}, not [n, {SIDE}, {SIDE}]");
        let (labels, path) = labels;
        fail_if!(labels.shape != shape[..1];
            file(path), "has the shape {:?}, not [{}] like the images", labels.shape, shape[0]);
        if let Some(label) = labels.data.iter().find(|&&label| usize::from(label) >= Self::CLASSES.len()) {
            fail!(file(path), "holds the class {label}; there are {}", Self::CLASSES.len());
        }
        Ok(Self {
            folder,
            sample_shape: vec![SIDE * SIDE],
            pixels: pixels.data,
            labels: labels.data,
            normalized_values: (0..=255u8).map(|p| (f32::from(p) / 255.0 - Self::MEAN) / Self::STD).collect(),
        })
    }

    setters! {
        /// Changes the shape of inputs from `[784]` to `[1, 28, 28]`, for convolutions.
        fn with_image_shape() { sample_shape: vec![1, SIDE, SIDE] }
    }

    /// Returns the folder of the files, or `<built into forebay>` for the embedded subset.
    #[must_use]
    pub fn folder(&self) -> &Path {
        &self.folder
    }
}

impl Dataset for FashionMnist {
    type Input = f32;
    type Target = i64;

    fn len(&self) -> usize {
        self.labels.len()
    }

    fn input_shape(&self) -> &[usize] {
        &self.sample_shape
    }

    fn target_shape(&self) -> &[usize] {
        &[]
    }

    fn get(&self, index: usize, input: &mut [f32], target: &mut [i64]) -> Result<()> {
        let pixels = &self.pixels[index * SIDE * SIDE..(index + 1) * SIDE * SIDE];
        for (value, &pixel) in input.iter_mut().zip(pixels) {
            *value = self.normalized_values[usize::from(pixel)];
        }
        target[0] = self.labels[index].into();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_included_part_is_complete_and_normalised() -> Result<()> {
        // Loads the embedded subset only, which is available to every program.
        let train = FashionMnist::load_embedded("train")?.with_image_shape();
        let test = FashionMnist::load_embedded("t10k")?;
        assert_eq!(test.folder(), Path::new(EMBEDDED_PATH));
        assert_eq!((train.len(), test.len()), (3300, 1000));
        assert_eq!((train.input_shape(), test.input_shape()), (&[1, 28, 28][..], &[784][..]));
        let (mut x, mut y, mut sum, mut squares) = (vec![0.0; 784], [0], 0.0, 0.0);
        for i in 0..train.len() {
            train.get(i, &mut x, &mut y)?;
            sum += x.iter().map(|&v| f64::from(v)).sum::<f64>();
            squares += x.iter().map(|&v| f64::from(v * v)).sum::<f64>();
            assert!((0..10).contains(&y[0]));
        }
        let n = (train.len() * 784) as f64;
        assert!((sum / n).abs() < 0.02 && (squares / n - 1.0).abs() < 0.02, "{} {}", sum / n, squares / n);
        Ok(())
    }

    #[test]
    fn a_missing_file_is_named() {
        let error =
            FashionMnist::open("/nonexistent", "train").err().map(|e| e.to_string()).unwrap_or_default();
        assert!(error.starts_with("/nonexistent/train-images-idx3-ubyte.gz: cannot be opened"), "{error}");
    }
}
