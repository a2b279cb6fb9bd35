//! Tests the page of `forebay memory view` in a real browser: a script clicks on the page and reports its contents.
//!
//! The test has no libtest harness, because libtest cannot report a skipped test and its reason. Without a browser the
//! test is ignored, which `cargo xtask test` counts as skipped. `FOREBAY_REQUIRE=browser` requires a browser.

use std::env;
use std::error::Error;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::sync::Arc;

use forebay::backend::null::{CardProfile, NullBackend};
use forebay::memory::{Config, Pool, Request, Tag, scope};

type TestResult = Result<(), Box<dyn Error>>;

const MIB: u64 = 1 << 20;
const BROWSERS: [&str; 4] = ["chromium", "chromium-browser", "google-chrome", "chrome"];

/// Clicks of a user, and the page after each. Blocks lie in one segment: 40 MiB, 60 MiB, and what is free.
const PROBE_SCRIPT: &str = r##"<pre id="seen"></pre><script>
const seen = [], tell = (what) => seen.push(what);
const words = (id) => get(id).innerText.split(/\s+/).join(" ").trim();
window.onerror = (message) => tell("error: " + message);
function click(canvas, x, y) {
  const box = canvas.getBoundingClientRect();
  canvas.dispatchEvent(new MouseEvent("click", { clientX: box.left + x, clientY: box.top + y }));
}
/// The middle of the n-th block that is drawn.
function middle(n) {
  const block = state[0].blocks[n], at = block.address + block.size / 2;
  const piece = pieces.find((p) => p.address <= at && at < p.address + p.size);
  return [piece.x + (at - piece.address) / piece.size * piece.width, piece.y + 5];
}
const probe = document.createElement("canvas").getContext("2d");
function hex(name) { probe.fillStyle = style(name); return probe.fillStyle; }
function pixel(canvas, [x, y]) {
  const ratio = canvas.width / canvas.clientWidth;
  const [r, g, b] = canvas.getContext("2d").getImageData(x * ratio, y * ratio, 1, 1).data;
  return "#" + [r, g, b].map((n) => n.toString(16).padStart(2, "0")).join("");
}
tell("opened at: " + words("event").split(" action")[0]);
tell("tags: " + words("tags"));
const colors = [0, 1].map((n) => pixel(segmentsCanvas, middle(n)));
tell("drawn: " + (colors[0] === hex("parameter") && colors[1] === hex("activation")));
click(segmentsCanvas, ...middle(1));
tell("block: " + words("block").replace(/address 0x\w+ /, ""));
get("to-end").click();
tell("end: " + words("event"));
tell("tags: " + words("tags"));
const widths = pieces[0].segment.blocks.map((b) => Math.round(b.size / 2 ** 20));
tell("blocks: " + widths.join(" "));
click(timelineCanvas, LEFT + 1, 100);
tell("clicked: " + words("event").split(" action")[0]);
const width = timelineCanvas.clientWidth;
click(timelineCanvas, LEFT + (width - LEFT) * (moment + 3.5) / last, 100);
tell("clicked: " + words("event"));
timelineCanvas.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowLeft" }));
tell("before: " + words("event").split(" action")[0]);
get("holders").querySelector("tr").click();
tell("holder: " + words("holders"));
get("by-time").click(); get("finer").click(); get("coarser").click(); get("whole").click();
tell("requests: " + performance.getEntriesByType("resource").length);
get("seen").textContent = seen.join("\n");
</script></body>"##;

fn find_browser() -> Option<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    let folders: Vec<PathBuf> = env::split_paths(&path).collect();
    BROWSERS.iter().flat_map(|name| folders.iter().map(move |p| p.join(name))).find(|p| p.is_file())
}

fn save_snapshot(path: &Path) -> TestResult {
    let card = CardProfile { total_bytes: 200 * MIB, ..CardProfile::default() };
    let pool = Pool::new(Arc::new(NullBackend::new(card)), Config::default()).with_device_name("fake:0");
    pool.start_recording(100);
    let _net = scope::enter_module("net");
    let _weight = pool.alloc(Request::new(40 * MIB).tag(Tag::Parameter).op("random"))?;
    {
        let _layer = scope::enter_module("<b>fc1</b>");
        let value = pool.alloc(Request::new(60 * MIB - 100).tag(Tag::Activation).op("relu"))?;
        pool.free(value);
    }
    assert!(pool.alloc(Request::new(300 * MIB).op("too_much")).is_err());
    let _gradient = pool.alloc(Request::new(10 * MIB).tag(Tag::Gradient))?;
    Ok(pool.snapshot().save(path)?)
}

fn check_page(browser: &Path, folder: &Path) -> TestResult {
    let (json, page) = (folder.join("snapshot.json"), folder.join("memory.html"));
    save_snapshot(&json)?;
    let written = Command::new(env!("CARGO_BIN_EXE_forebay"))
        .args(["memory", "view"])
        .args([json.as_os_str(), "-o".as_ref(), page.as_os_str()])
        .output()?;
    assert!(written.status.success(), "{}", String::from_utf8_lossy(&written.stderr));
    let visited = fs::read_to_string(&page)?.replace("</body>", PROBE_SCRIPT);
    fs::write(&page, visited)?;
    let output = Command::new(browser)
        .args(["--headless", "--no-sandbox", "--disable-gpu", "--window-size=1400,900", "--dump-dom"])
        .args(["--virtual-time-budget=5000", "--force-device-scale-factor=1"])
        .arg(format!("--user-data-dir={}", folder.join("profile").display()))
        .arg(format!("file://{}", page.display()))
        .output()?;
    let dom = String::from_utf8_lossy(&output.stdout);
    let seen = dom.split_once("<pre id=\"seen\">").and_then(|(_, rest)| rest.split_once("</pre>"));
    let Some((seen, _)) = seen else {
        return Err(format!("the page did not open:\n{}", String::from_utf8_lossy(&output.stderr)).into());
    };
    let lines: Vec<String> = seen.lines().map(strip_lines_and_times).collect();
    let expected = [
        "opened at: after event 4 of 10: the peak",
        "tags: parameter 40.0 MiB activation 60.0 MiB all 100.0 MiB free or waiting 0 B",
        "drawn: true",
        "block: state active allocated bytes 60.0 MiB (62914560), 62914460 requested tag activation \
         module net.&lt;b&gt;fc1&lt;/b&gt; operation relu call site cli/tests/viewer.rs:LINE relu \
         allocated by event 4",
        "end: after event 10 of 10 action alloc bytes 10.0 MiB (10485760) when TIME s tag gradient module net \
         call site cli/tests/viewer.rs:LINE",
        "tags: parameter 40.0 MiB gradient 10.0 MiB all 50.0 MiB free or waiting 22.0 MiB",
        "blocks: 40 10 22",
        "clicked: after event 0 of 10",
        "clicked: after event 3 of 10 action segment map bytes 60.0 MiB (62914560) when TIME s",
        "before: after event 2 of 10",
        "holder: parameter of net, in random (cli/tests/viewer.rs:LINE) 40.0 MiB",
        "requests: 0",
    ];
    match lines == expected {
        true => Ok(()),
        false => Err(format!("expected\n{}\n\ngot\n{}", expected.join("\n"), lines.join("\n")).into()),
    }
}

/// Returns a text that is equal for every version of this file and every run.
fn strip_lines_and_times(line: &str) -> String {
    let words = line.split(' ').map(|word| match word.split_once(".rs:") {
        Some((file, number)) => {
            let end = number.trim_start_matches(|c: char| c.is_ascii_digit());
            format!("{file}.rs:LINE{end}")
        }
        None if word.len() == 8 && word.starts_with("0.") => "TIME".to_owned(),
        None => word.to_owned(),
    });
    words.collect::<Vec<_>>().join(" ")
}

fn main() -> ExitCode {
    const TEST: &str = "the_page_shows_what_is_clicked";
    let required = env::var("FOREBAY_REQUIRE").is_ok_and(|v| v.split(',').any(|w| w.trim() == "browser"));
    let Some(browser) = find_browser() else {
        let verdict = if required { "FAILED" } else { "ignored" };
        println!("test {TEST} ... {verdict}, no browser was found ({})", BROWSERS.join(", "));
        let (word, failed) = if required { ("FAILED", 1) } else { ("ok", 0) };
        println!("test result: {word}. 0 passed; {failed} failed; {} ignored", 1 - failed);
        return ExitCode::from(failed);
    };
    let folder = env::temp_dir().join(format!("forebay-viewer-{}", std::process::id()));
    let outcome =
        fs::create_dir_all(&folder).map_err(Into::into).and_then(|()| check_page(&browser, &folder));
    // Leftovers are in the folder of temporary files.
    let _ = fs::remove_dir_all(&folder);
    match outcome {
        Ok(()) => {
            println!("test {TEST} ... ok\ntest result: ok. 1 passed; 0 failed; 0 ignored");
            ExitCode::SUCCESS
        }
        Err(error) => {
            println!("test {TEST} ... FAILED\n{error}\ntest result: FAILED. 0 passed; 1 failed; 0 ignored");
            ExitCode::FAILURE
        }
    }
}
