//! Tests of the disk cache: keys, damaged files, folders that cannot be made, and choices of timing.

use std::fs;
use std::path::PathBuf;

use super::{CacheKey, ChoiceCache, DiskCache, cache_folder, fnv1a};

/// A folder of the test that does not exist at first, removed at the end.
struct TempFolder(PathBuf);

impl TempFolder {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("forebay-cache-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        Self(path)
    }

    fn cache(&self) -> DiskCache {
        DiskCache::in_folder(Some(&self.0))
    }

    fn only_file(&self) -> PathBuf {
        let mut files: Vec<_> = fs::read_dir(&self.0).unwrap().map(|e| e.unwrap().path()).collect();
        assert_eq!(files.len(), 1, "{files:?}");
        files.remove(0)
    }
}

impl Drop for TempFolder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[test]
fn the_hash_is_fnv_1a() {
    // The published test vectors for the empty string and "a".
    assert_eq!(fnv1a([&b""[..]]), 0x6c62272e07bb014262b821756295c58d);
    assert_eq!(fnv1a([&b"a"[..]]), 0xd228cb696f1a8caf78912b704e4a8964);
}

#[test]
fn keys_tell_texts_apart_however_they_are_divided() {
    let keys = [&["ab", "c"][..], &["a", "bc"], &["abc"], &["abc", ""]].map(CacheKey::new);
    for (at, key) in keys.iter().enumerate() {
        assert!(keys[..at].iter().all(|other| other != key), "{at}");
    }
    assert_eq!(keys[0], CacheKey::new(&["ab", "c"]));
}

#[test]
fn a_damaged_file_is_ignored_and_written_again() {
    let folder = TempFolder::new("damaged");
    let cache = folder.cache();
    assert_eq!(cache.load("a.code"), None);
    cache.store("a.code", b"some code");
    assert_eq!(cache.load("a.code").as_deref(), Some(&b"some code"[..]));
    let file = folder.only_file();
    let whole = fs::read(&file).unwrap();
    for length in 0..whole.len() {
        fs::write(&file, &whole[..length]).unwrap();
        assert_eq!(cache.load("a.code"), None, "cut to {length} bytes");
    }
    for at in 0..whole.len() {
        let mut bytes = whole.clone();
        bytes[at] ^= 4;
        fs::write(&file, &bytes).unwrap();
        assert_eq!(cache.load("a.code"), None, "changed at {at}");
    }
    cache.store("a.code", b"other code");
    assert_eq!(cache.load("a.code").as_deref(), Some(&b"other code"[..]));
    folder.only_file();
}

/// Without the check, the cache would read the pipe's valid content.
#[test]
#[cfg(unix)]
fn only_regular_files_are_read() {
    use std::os::unix::fs::symlink;

    let folder = TempFolder::new("pipe");
    let cache = folder.cache();
    cache.store("a.code", b"some code");
    let content = fs::read(folder.only_file()).unwrap();
    let pipe = folder.0.join("b.code");
    assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    symlink(&pipe, folder.0.join("c.code")).unwrap();
    symlink("/dev/null", folder.0.join("d.code")).unwrap();
    fs::create_dir(folder.0.join("e.code")).unwrap();
    symlink(folder.0.join("a.code"), folder.0.join("f.code")).unwrap();
    let writer = {
        let pipe = pipe.clone();
        std::thread::spawn(move || fs::write(pipe, content).unwrap())
    };
    for name in ["b.code", "c.code", "d.code", "e.code"] {
        assert_eq!(cache.load(name), None, "{name}");
        // Nothing but a regular file is replaced.
        cache.store(name, b"other code");
    }
    assert_eq!(cache.load("f.code").as_deref(), Some(&b"some code"[..]));
    // The writer waits for a reader.
    assert!(fs::read(&pipe).unwrap().ends_with(b"some code"));
    writer.join().unwrap();
}

#[test]
fn files_are_found_by_the_ends_of_their_names() {
    let folder = TempFolder::new("names");
    let cache = folder.cache();
    assert!(cache.find_names("", "").is_empty());
    for name in ["a-1.code", "a-2.code", "b-1.code", "a-3.text"] {
        cache.store(name, b"");
    }
    assert_eq!(cache.find_names("a-", ".code"), ["a-2.code", "a-1.code"]);
}

#[test]
fn a_folder_that_cannot_be_made_is_no_error() {
    let folder = TempFolder::new("file");
    fs::write(&folder.0, b"a file where the folder should be").unwrap();
    folder.cache().store("a", b"code");
    assert_eq!(folder.cache().load("a"), None);
    fs::remove_file(&folder.0).unwrap();
    let none = DiskCache::in_folder(None);
    none.store("a", b"code");
    assert_eq!(none.load("a"), None);
}

#[test]
fn the_environment_names_the_folder() {
    let home = || Some(PathBuf::from("/home/a"));
    assert_eq!(cache_folder(Some("/x".into()), Some("/y".into()), home()), Some("/x".into()));
    assert_eq!(cache_folder(Some("".into()), Some("/y".into()), home()), None);
    assert_eq!(cache_folder(None, Some("/y".into()), home()), Some("/y/forebay".into()));
    assert_eq!(cache_folder(None, Some("y".into()), home()), Some("/home/a/.cache/forebay".into()));
    assert_eq!(cache_folder(None, None, None), None);
}

#[test]
fn choices_belong_to_one_owner_and_one_problem() {
    let folder = TempFolder::new("choices");
    let choices = |owner: &str| ChoiceCache::new(owner.to_owned(), folder.cache());
    let first = choices("card a, driver 1");
    assert_eq!((first.load("64x64"), first.count()), (None, 0));
    first.store("64x64", b"tile 1\nand 2");
    assert_eq!(choices("card a, driver 1").load("64x64").as_deref(), Some(&b"tile 1\nand 2"[..]));
    for other in ["card a, driver 2", "card b, driver 1"] {
        assert_eq!((choices(other).load("64x64"), choices(other).count()), (None, 0), "{other}");
    }
    assert_eq!(first.load("64x65"), None);
    first.store("64x65", b"");
    assert_eq!((first.load("64x65").as_deref(), first.count()), (Some(&b""[..]), 2));
}

#[test]
fn a_choice_that_was_copied_to_another_name_is_ignored() {
    let folder = TempFolder::new("copied");
    let choices = ChoiceCache::new("card".into(), folder.cache());
    choices.store("64x64", b"tile");
    let file = folder.only_file();
    choices.store("32x32", b"other");
    let other = fs::read_dir(&folder.0).unwrap().map(|e| e.unwrap().path()).find(|path| *path != file);
    fs::copy(&file, other.unwrap()).unwrap();
    assert_eq!(choices.load("32x32"), None);
    assert_eq!(choices.load("64x64").as_deref(), Some(&b"tile"[..]));
}
