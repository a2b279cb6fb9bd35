//! The null device (being written).
