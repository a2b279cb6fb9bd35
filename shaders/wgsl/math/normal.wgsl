// needs: mul_wide
//
// Normal random values by the inverse of their distribution, in integers: the same bits on every device.
//
// The top bit is the sign. The other 31 bits m give p = (2m + 1) / 2^33, in octaves (leading bit of 2m + 1).
// Each octave has a polynomial of degree 7 in Q4.28, fitted at Chebyshev nodes. Largest error against the
// true inverse: 9e-8.
struct m_Poly {
    low: vec4<i32>,
    high: vec4<i32>,
}

// A switch, because compilers copy a constant array that is indexed by a variable.
fn m_normal_poly(octave: u32) -> m_Poly {
    var low: vec4<i32>;
    var high: vec4<i32>;
    switch octave {
        case 31u: {
            low = vec4<i32>(181056940i, -211179375i, 55959259i, -40986137i);
            high = vec4<i32>(25351482i, -14963886i, 5918241i, -1156540i);
        }
        case 30u: {
            low = vec4<i32>(308794538i, -162998537i, 56864234i, -35952463i);
            high = vec4<i32>(23563585i, -13602857i, 5425007i, -1036560i);
        }
        case 29u: {
            low = vec4<i32>(411812327i, -136415192i, 53116706i, -32975965i);
            high = vec4<i32>(21782462i, -12593500i, 5029229i, -961523i);
        }
        case 28u: {
            low = vec4<i32>(500023259i, -119184960i, 49230643i, -30590937i);
            high = vec4<i32>(20286369i, -11751248i, 4697922i, -898714i);
        }
        case 27u: {
            low = vec4<i32>(578176318i, -106936094i, 45825372i, -28600568i);
            high = vec4<i32>(19026175i, -11040112i, 4417718i, -845544i);
        }
        case 26u: {
            low = vec4<i32>(648958540i, -97689208i, 42924182i, -26915615i);
            high = vec4<i32>(17953234i, -10432812i, 4178018i, -800015i);
        }
        case 25u: {
            low = vec4<i32>(714056408i, -90407471i, 40450923i, -25472451i);
            high = vec4<i32>(17029420i, -9908366i, 3970680i, -760598i);
        }
        case 24u: {
            low = vec4<i32>(774606708i, -84490926i, 38325216i, -24222722i);
            high = vec4<i32>(16225501i, -9450726i, 3789482i, -726122i);
        }
        case 23u: {
            low = vec4<i32>(831416822i, -79566246i, 36480118i, -23129426i);
            high = vec4<i32>(15519066i, -9047578i, 3629642i, -695686i);
        }
        case 22u: {
            low = vec4<i32>(885083585i, -75387879i, 34862936i, -22164097i);
            high = vec4<i32>(14892810i, -8689390i, 3487457i, -668594i);
        }
        case 21u: {
            low = vec4<i32>(936062366i, -71787082i, 33432689i, -21304641i);
            high = vec4<i32>(14333241i, -8368708i, 3360022i, -644298i);
        }
        case 20u: {
            low = vec4<i32>(984709631i, -68643705i, 32157418i, -20533732i);
            high = vec4<i32>(13829723i, -8079638i, 3245038i, -622364i);
        }
        case 19u: {
            low = vec4<i32>(1031310403i, -65869653i, 31011988i, -19837630i);
            high = vec4<i32>(13373772i, -7817462i, 3140663i, -602445i);
        }
        case 18u: {
            low = vec4<i32>(1076096687i, -63398716i, 29976422i, -19205315i);
            high = vec4<i32>(12958550i, -7578368i, 3045403i, -584257i);
        }
        case 17u: {
            low = vec4<i32>(1119260230i, -61180074i, 29034676i, -18627854i);
            high = vec4<i32>(12578484i, -7359240i, 2958038i, -567570i);
        }
        case 16u: {
            low = vec4<i32>(1160961603i, -59174008i, 28173722i, -18097934i);
            high = vec4<i32>(12228994i, -7157509i, 2877557i, -552193i);
        }
        case 15u: {
            low = vec4<i32>(1201336815i, -57348974i, 27382881i, -17609509i);
            high = vec4<i32>(11906273i, -6971035i, 2803122i, -537966i);
        }
        case 14u: {
            low = vec4<i32>(1240502240i, -55679574i, 26653312i, -17157539i);
            high = vec4<i32>(11607137i, -6798027i, 2734026i, -524756i);
        }
        case 13u: {
            low = vec4<i32>(1278558344i, -54145102i, 25977634i, -16737787i);
            high = vec4<i32>(11328898i, -6636965i, 2669670i, -512449i);
        }
        case 12u: {
            low = vec4<i32>(1315592551i, -52728488i, 25349634i, -16346663i);
            high = vec4<i32>(11069274i, -6486561i, 2609547i, -500948i);
        }
        case 11u: {
            low = vec4<i32>(1351681487i, -51415524i, 24764047i, -15981107i);
            high = vec4<i32>(10826309i, -6345705i, 2553219i, -490171i);
        }
        case 10u: {
            low = vec4<i32>(1386892743i, -50194275i, 24216372i, -15638491i);
            high = vec4<i32>(10598323i, -6213445i, 2500308i, -480046i);
        }
        case 9u: {
            low = vec4<i32>(1421286295i, -49054633i, 23702747i, -15316546i);
            high = vec4<i32>(10383859i, -6088952i, 2450488i, -470511i);
        }
        case 8u: {
            low = vec4<i32>(1454915645i, -47987978i, 23219829i, -15013303i);
            high = vec4<i32>(10181649i, -5971506i, 2403472i, -461510i);
        }
        case 7u: {
            low = vec4<i32>(1487828754i, -46986903i, 22764714i, -14727041i);
            high = vec4<i32>(9990584i, -5860473i, 2359012i, -452998i);
        }
        case 6u: {
            low = vec4<i32>(1520068808i, -46045008i, 22334864i, -14456251i);
            high = vec4<i32>(9809689i, -5755299i, 2316885i, -444931i);
        }
        case 5u: {
            low = vec4<i32>(1551674857i, -45156731i, 21928053i, -14199606i);
            high = vec4<i32>(9638103i, -5655491i, 2276898i, -437272i);
        }
        case 4u: {
            low = vec4<i32>(1582682344i, -44317211i, 21542316i, -13955927i);
            high = vec4<i32>(9475064i, -5560614i, 2238877i, -429990i);
        }
        case 3u: {
            low = vec4<i32>(1613123556i, -43522177i, 21175912i, -13724172i);
            high = vec4<i32>(9319892i, -5470278i, 2202668i, -423053i);
        }
        case 2u: {
            low = vec4<i32>(1643027996i, -42767865i, 20827296i, -13503409i);
            high = vec4<i32>(9171981i, -5384137i, 2168133i, -416436i);
        }
        case 1u: {
            low = vec4<i32>(1672422712i, -42050939i, 20495087i, -13292803i);
            high = vec4<i32>(9030787i, -5301878i, 2135148i, -410116i);
        }
        default: {
            low = vec4<i32>(1701332571i, -41368431i, 20178049i, -13091607i);
            high = vec4<i32>(8895823i, -5223222i, 2103602i, -404071i);
        }
    }
    return m_Poly(low, high);
}

// a * t / 2^31 rounded towards zero, for a fraction t of 31 bits.
fn m_scale_fixed(a: i32, t: u32) -> i32 {
    let product = m_mul_wide(u32(abs(a)), t);
    let scaled = i32((product.x << 1u) | (product.y >> 31u));
    return select(scaled, -scaled, a < 0);
}

fn m_normal(x: u32) -> f32 {
    let odd = ((x & 0x7fffffffu) << 1u) | 1u;
    let octave = 31u - countLeadingZeros(odd);
    // The bits below the leading one, as a fraction in 31 bits.
    let t = (odd << (31u - octave)) & 0x7fffffffu;
    let c = m_normal_poly(octave);
    var sum = m_scale_fixed(c.high.w, t) + c.high.z;
    sum = m_scale_fixed(sum, t) + c.high.y;
    sum = m_scale_fixed(sum, t) + c.high.x;
    sum = m_scale_fixed(sum, t) + c.low.w;
    sum = m_scale_fixed(sum, t) + c.low.z;
    sum = m_scale_fixed(sum, t) + c.low.y;
    sum = m_scale_fixed(sum, t) + c.low.x;
    // Truncated to 24 bits, so that the conversion is exact.
    let magnitude = u32(max(sum, 0));
    let spare = 8u - min(8u, countLeadingZeros(magnitude));
    let z = f32((magnitude >> spare) << spare) * 3.7252902984619140625e-9;
    return select(z, -z, (x >> 31u) == 1u);
}
