//! Tool of `cargo xtask browser`: generates the JavaScript bindings of the page, and serves the page.
//!
//! - `browser-tool bindings MODULE.wasm FOLDER` writes the bindings of a module.
//! - `browser-tool serve FOLDER PORT` serves a folder until the program is ended.
//! - `browser-tool test FOLDER PATH BROWSER [ARGUMENT...]` opens a path of the page in a browser, and prints the text
//!   that the page posts to `/result`.

use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use tiny_http::{Header, Method, Request, Response, Server};
use wasm_bindgen_cli_support::Bindgen;

/// Time in which the page must post its result, on a machine with other work.
const TEST_TIMEOUT: Duration = Duration::from_secs(900);
/// Longest result that is read.
const MAX_RESULT_BYTES: u64 = 1 << 20;

fn main() -> Result<()> {
    let arguments = std::env::args().skip(1).collect::<Vec<_>>();
    let arguments = arguments.iter().map(String::as_str).collect::<Vec<_>>();
    match arguments[..] {
        ["bindings", module, folder] => Bindgen::new()
            .input_path(module)
            .typescript(false)
            .omit_default_module_path(false)
            .web(true)?
            .generate(folder),
        ["serve", folder, port] => serve(Path::new(folder), port.parse().context("a port is a number")?),
        ["test", folder, path, browser, ref rest @ ..] => test(Path::new(folder), path, browser, rest),
        _ => bail!(
            "usage: bindings MODULE FOLDER, serve FOLDER PORT, or test FOLDER PATH BROWSER [ARGUMENT...]"
        ),
    }
}

/// Starts a server on this machine's own address, which browsers trust with WebGPU.
fn bind(port: u16) -> Result<(Server, String)> {
    let server = Server::http(("127.0.0.1", port)).map_err(|error| anyhow!("port {port}: {error}"))?;
    let address = server.server_addr().to_ip().context("the server has no address")?;
    Ok((server, format!("http://{address}")))
}

fn serve(folder: &Path, port: u16) -> Result<()> {
    let (server, address) = bind(port)?;
    println!("{address}/ (Ctrl-C ends the server)");
    for request in server.incoming_requests() {
        respond(request, folder)?;
    }
    Ok(())
}

/// Opens the page in a browser, and prints the page's result.
fn test(folder: &Path, path: &str, browser: &str, arguments: &[&str]) -> Result<()> {
    let (server, address) = bind(0)?;
    let mut running = Command::new(browser)
        .args(arguments)
        .arg(format!("{address}/{path}"))
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .with_context(|| format!("{browser} cannot be started"))?;
    let result = receive_result(&server, folder);
    // A browser that has ended by itself cannot be ended.
    let _ = running.kill();
    running.wait()?;
    println!("{}", result?);
    Ok(())
}

/// Serves the folder until the page posts its result.
fn receive_result(server: &Server, folder: &Path) -> Result<String> {
    let start = Instant::now();
    while let Some(left) = TEST_TIMEOUT.checked_sub(start.elapsed()) {
        let Some(mut request) = server.recv_timeout(left)? else { break };
        if *request.method() != Method::Post {
            respond(request, folder)?;
            continue;
        }
        let mut text = String::new();
        request.as_reader().take(MAX_RESULT_BYTES).read_to_string(&mut text)?;
        request.respond(Response::empty(204))?;
        return Ok(text);
    }
    bail!("the page posted no result within {} s", TEST_TIMEOUT.as_secs())
}

/// Answers a request with a file of the folder.
fn respond(request: Request, folder: &Path) -> Result<()> {
    let sent =
        match requested_file(folder, request.url()).and_then(|path| Some((fs::read(&path).ok()?, path))) {
            Some((bytes, path)) => {
                let header = Header::from_bytes("Content-Type", content_type(&path));
                let header = header.map_err(|()| anyhow!("the content type is no header"))?;
                request.respond(Response::from_data(bytes).with_header(header))
            }
            None => request.respond(Response::empty(404)),
        };
    // A browser may close a connection early.
    sent.or_else(|error| match error.kind() {
        std::io::ErrorKind::BrokenPipe | std::io::ErrorKind::ConnectionReset => Ok(()),
        _ => Err(error.into()),
    })
}

/// Returns the file of a URL: a name in the folder, without subfolders.
fn requested_file(folder: &Path, url: &str) -> Option<PathBuf> {
    let name = url.split(['?', '#']).next()?.strip_prefix('/')?;
    let name = if name.is_empty() { "index.html" } else { name };
    (!name.contains(['/', '\\']) && !name.starts_with('.')).then(|| folder.join(name))
}

fn content_type(path: &Path) -> &'static str {
    match path.extension().and_then(|end| end.to_str()) {
        Some("html") => "text/html; charset=utf-8",
        Some("js") => "text/javascript",
        Some("css") => "text/css",
        Some("wasm") => "application/wasm",
        _ => "application/octet-stream",
    }
}
