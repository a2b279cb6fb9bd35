// Matrices: C columns, each a vector of R.
namespace wgsl {

template <class T, u32 C, u32 R> struct mat {
    cell<vec<T, R>> c[C];
    WGSL_FN vec<T, R>& operator[](u32 i) { return c[i].t; }
    WGSL_FN const vec<T, R>& operator[](u32 i) const { return c[i].t; }
};

template <class T, u32 C, u32 R> WGSL_FN mat<T, C, R> operator+(const mat<T, C, R>& a, const mat<T, C, R>& b) {
    mat<T, C, R> r;
    for (u32 i = 0; i < C; i++) r[i] = a[i] + b[i];
    return r;
}
template <class T, u32 C, u32 R> WGSL_FN mat<T, C, R> operator-(const mat<T, C, R>& a, const mat<T, C, R>& b) {
    mat<T, C, R> r;
    for (u32 i = 0; i < C; i++) r[i] = a[i] - b[i];
    return r;
}
template <class T, u32 C, u32 R> WGSL_FN mat<T, C, R> operator*(const mat<T, C, R>& a, T b) {
    mat<T, C, R> r;
    for (u32 i = 0; i < C; i++) r[i] = a[i] * b;
    return r;
}
template <class T, u32 C, u32 R> WGSL_FN mat<T, C, R> operator*(T a, const mat<T, C, R>& b) { return b * a; }
template <class T, u32 C, u32 R> WGSL_FN vec<T, R> operator*(const mat<T, C, R>& a, const vec<T, C>& b) {
    vec<T, R> r = a[0] * b[0];
    for (u32 i = 1; i < C; i++) r = r + a[i] * b[i];
    return r;
}
template <class T, u32 C, u32 R> WGSL_FN vec<T, C> operator*(const vec<T, R>& a, const mat<T, C, R>& b) {
    vec<T, C> r;
    for (u32 i = 0; i < C; i++) r[i] = dot(a, b[i]);
    return r;
}
template <class T, u32 K, u32 C, u32 R>
WGSL_FN mat<T, C, R> operator*(const mat<T, K, R>& a, const mat<T, C, K>& b) {
    mat<T, C, R> r;
    for (u32 i = 0; i < C; i++) r[i] = a * b[i];
    return r;
}
template <class T, u32 C, u32 R> WGSL_FN mat<T, R, C> transpose(const mat<T, C, R>& a) {
    mat<T, R, C> r;
    for (u32 i = 0; i < R; i++)
        for (u32 j = 0; j < C; j++) r[i][j] = a[j][i];
    return r;
}
template <class T, class S, u32 C, u32 R> WGSL_FN mat<T, C, R> cast(const mat<S, C, R>& a) {
    mat<T, C, R> r;
    for (u32 i = 0; i < C; i++) r[i] = cast<T>(a[i]);
    return r;
}
template <class T> WGSL_FN T determinant(const mat<T, 2, 2>& m) { return m[0].x * m[1].y - m[1].x * m[0].y; }
template <class T> WGSL_FN T determinant(const mat<T, 3, 3>& m) { return dot(m[0], cross(m[1], m[2])); }
template <class T> WGSL_FN T determinant(const mat<T, 4, 4>& m) {
    T a = m[0].x * m[1].y - m[0].y * m[1].x, b = m[0].x * m[1].z - m[0].z * m[1].x;
    T c = m[0].x * m[1].w - m[0].w * m[1].x, d = m[0].y * m[1].z - m[0].z * m[1].y;
    T e = m[0].y * m[1].w - m[0].w * m[1].y, f = m[0].z * m[1].w - m[0].w * m[1].z;
    T g = m[2].x * m[3].y - m[2].y * m[3].x, h = m[2].x * m[3].z - m[2].z * m[3].x;
    T i = m[2].x * m[3].w - m[2].w * m[3].x, j = m[2].y * m[3].z - m[2].z * m[3].y;
    T k = m[2].y * m[3].w - m[2].w * m[3].y, l = m[2].z * m[3].w - m[2].w * m[3].z;
    return a * l - b * k + c * j + d * i - e * h + f * g;
}

} // namespace wgsl
