// A tree reduction with barriers, and a uniform load.
// expect: 2081 2082 2083 2084 2085 2086 2087 2088 2089 2090 2091 2092 2093 2094 2095 2096 2097 2098 2099 2100 2101 2102 2103 2104 2105 2106 2107 2108 2109 2110 2111 2112 2113 2114 2115 2116 2117 2118 2119 2120 2121 2122 2123 2124 2125 2126 2127 2128 2129 2130 2131 2132 2133 2134 2135 2136 2137 2138 2139 2140 2141 2142 2143 2080
@group(0) @binding(0) var<storage, read_write> out: array<u32>;
@group(0) @binding(1) var<storage, read> zeros: array<u32>;

var<workgroup> partial: array<u32, 64>;

@compute @workgroup_size(64)
fn main(@builtin(local_invocation_index) lane: u32) {
    partial[lane] = lane + 1u;
    for (var step = 32u; step > 0u; step >>= 1u) {
        workgroupBarrier();
        if lane < step {
            partial[lane] += partial[lane + step];
        }
    }
    let total = workgroupUniformLoad(&partial[zeros[0]]);
    partial[lane] = total + lane;
    workgroupBarrier();
    out[lane] = partial[(lane + 1u) % 64u];
}
