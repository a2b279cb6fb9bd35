//! Short forms for the lists of operations.

/// Draws an argument of a kind: `t1` to `t4` are tensors of the call, other kinds are methods of `ArgGenerator`. A
/// struct of options has a kind for each field.
macro_rules! fuzz_arg {
    ($r:ident, $t:ident, $options:ident { $($field:ident: $kind:ident),* $(,)? }) => {
        &$options { $($field: fuzz_arg!($r, $t, $kind)),* }
    };
    ($r:ident, $t:ident, t1) => { &$t[1] };
    ($r:ident, $t:ident, t2) => { &$t[2] };
    ($r:ident, $t:ident, t3) => { &$t[3] };
    ($r:ident, $t:ident, t4) => { &$t[4] };
    ($r:ident, $t:ident, maybe1) => { $r.maybe(|_| &$t[1]) };
    ($r:ident, $t:ident, maybe2) => { $r.maybe(|_| &$t[2]) };
    ($r:ident, $t:ident, maybe3) => { $r.maybe(|_| &$t[3]) };
    ($r:ident, $t:ident, maybe4) => { $r.maybe(|_| &$t[4]) };
    ($r:ident, $t:ident, operand1) => { $r.operand(&$t[1]) };
    ($r:ident, $t:ident, operand2) => { $r.operand(&$t[2]) };
    ($r:ident, $t:ident, operand3) => { $r.operand(&$t[3]) };
    ($r:ident, $t:ident, running) => { $r.maybe(|_| (&$t[3], &$t[4])) };
    ($r:ident, $t:ident, tensors) => { &$r.tensor_list($t)[..] };
    ($r:ident, $t:ident, indices) => { &$r.index_list($t)[..] };
    ($r:ident, $t:ident, device) => { $t[0].device() };
    ($r:ident, $t:ident, ints) => { &$r.ints()[..] };
    ($r:ident, $t:ident, counts) => { &$r.counts()[..] };
    ($r:ident, $t:ident, floats) => { &$r.floats()[..] };
    ($r:ident, $t:ident, int2) => { $r.int_array::<2>() };
    ($r:ident, $t:ident, count1) => { $r.count_array::<1>() };
    ($r:ident, $t:ident, count2) => { $r.count_array::<2>() };
    ($r:ident, $t:ident, count3) => { $r.count_array::<3>() };
    ($r:ident, $t:ident, maybe_int) => { $r.maybe(ArgGenerator::int) };
    ($r:ident, $t:ident, maybe_count) => { $r.maybe(ArgGenerator::count) };
    ($r:ident, $t:ident, maybe_float) => { $r.maybe(ArgGenerator::float) };
    ($r:ident, $t:ident, interpolate) => { &$r.interpolate() };
    ($r:ident, $t:ident, im2col) => { &$r.im2col() };
    ($r:ident, $t:ident, attention) => { &$r.attention($t) };
    ($r:ident, $t:ident, batch_norm) => { &$r.batch_norm($t) };
    ($r:ident, $t:ident, bags) => { &$r.bags($t) };
    ($r:ident, $t:ident, cross_entropy) => { &$r.cross_entropy($t) };
    ($r:ident, $t:ident, lookup) => { &$r.lookup() };
    ($r:ident, $t:ident, $kind:ident) => { $r.$kind() };
}

/// A method of `Tensor`, with the kinds of its arguments: `gather(int, t1)`.
macro_rules! method {
    ($name:ident($($kind:ident $({ $($fields:tt)* })?),* $(,)?)) => {
        FuzzOp {
            name: stringify!($name),
            run: |_r, t| {
                t[0].$name($(fuzz_arg!(_r, t, $kind $({ $($fields)* })?)),*).map(IntoTensors::into_tensors)
            },
        }
    };
}

/// A function of `ops`, with the kinds of its arguments: `cat(tensors, int)`.
macro_rules! function {
    ($name:ident($($kind:ident),*)) => {
        FuzzOp {
            name: stringify!($name),
            run: |r, t| $name($(fuzz_arg!(r, t, $kind)),*).map(IntoTensors::into_tensors),
        }
    };
}

/// An associated function of `Tensor`, with the kinds of its arguments: `eye(count, count, dtype, device)`.
macro_rules! constructor {
    ($name:ident($($kind:ident),*)) => {
        FuzzOp {
            name: stringify!($name),
            run: |r, t| Tensor::$name($(fuzz_arg!(r, t, $kind)),*).map(IntoTensors::into_tensors),
        }
    };
}

/// Golden call of a method without arguments.
macro_rules! unary_call {
    ($name:ident) => {
        |a| single(a.tensor(0)?.$name())
    };
}

/// Golden call of a method that takes a tensor or a number.
macro_rules! binary_call {
    ($name:ident) => {
        |a| single(a.tensor_or_scalar(0, 1)?.$name(a.operand(1, "other", Scalar::Int(0))?))
    };
}

/// Golden call of Python's reversed operator: the second argument is the left operand.
macro_rules! reversed_call {
    ($name:ident) => {
        |a| single(a.tensor_or_scalar(1, 0)?.$name(a.tensor(0)?))
    };
}

/// Golden call of a cast.
macro_rules! cast_call {
    ($dtype:ident) => {
        |a| single(a.tensor(0)?.to_dtype(DType::$dtype))
    };
}

/// Case of a factory.
macro_rules! factory {
    ($name:literal, |$dtype:ident, $device:ident| $made:expr) => {
        nondifferentiable($name, &[Signed(S)], |x| {
            let ($dtype, $device) = (x[0].dtype(), x[0].device());
            $made
        })
        .as_factory()
    };
}
