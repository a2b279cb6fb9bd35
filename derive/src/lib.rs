//! `#[derive(Module)]` for forebay: makes a struct of modules, tensors and plain values a module.
//!
//! The derived `visit` calls `visit` of each field in order of declaration. A field's path is its name, or its index
//! in a tuple struct. Every field's type must implement `Module`: tensors, layers, containers and plain values
//! (integers, floats, strings, devices) do. Three attributes change this:
//! - `#[module(skip)]` on a field leaves the field out, whatever its type.
//! - `#[module(name = "self")]` on a field sets its name, to match the names in weight files. With an empty name,
//!   entries of the field appear directly under the module's own path, as for a wrapper of one layer.
//! - `#[module(crate = path)]` on the type names the crate that contains `nn`; the default is `::forebay`.

use proc_macro2::{Delimiter, Span, TokenStream, TokenTree};
use quote::{ToTokens, format_ident, quote};
use syn::spanned::Spanned;
use syn::{Attribute, Data, DeriveInput, Error, Field, Fields, Index, LitStr, Path, Result, Token, Variant};

/// Implements `Module` for a struct or an enum.
///
/// For an enum, `visit` visits the fields of the active variant. A variant with one unnamed field adds no name.
///
/// ```text
/// #[derive(Module)]
/// struct Net {
///     fc1: Linear,
///     fc2: Linear,
///     #[module(skip)]
///     cache: Mutex<Vec<Tensor>>,
/// }
/// ```
#[proc_macro_derive(Module, attributes(module))]
pub fn derive_module(input: proc_macro::TokenStream) -> proc_macro::TokenStream {
    let input = syn::parse_macro_input!(input as DeriveInput);
    expand_module(&input).unwrap_or_else(Error::into_compile_error).into()
}

fn expand_module(input: &DeriveInput) -> Result<TokenStream> {
    let root = crate_root(&input.attrs)?;
    let nn = quote!(#root::nn);
    let mut seen: Vec<&syn::Type> = Vec::new();
    let (visits, paths) = match &input.data {
        Data::Struct(data) => match_arms(&nn, &quote!(Self), &data.fields, false, &mut seen)?,
        Data::Enum(data) => {
            let (mut visits, mut paths) = (TokenStream::new(), TokenStream::new());
            for Variant { ident, fields, .. } in &data.variants {
                let is_wrapper = fields.len() == 1 && matches!(fields, Fields::Unnamed(_));
                let (visit, path) = match_arms(&nn, &quote!(Self::#ident), fields, is_wrapper, &mut seen)?;
                visits.extend(visit);
                paths.extend(path);
            }
            (visits, paths)
        }
        Data::Union(data) => {
            return Err(Error::new(data.union_token.span, "a union cannot be a module; use a struct"));
        }
    };
    let mut generics = input.generics.clone();
    if generics.type_params().next().is_some() {
        // The bound is on the fields' types, not on the type parameters: skipped fields may use other types.
        let clause = generics.make_where_clause();
        for ty in seen {
            clause.predicates.push(syn::parse_quote!(#ty: #nn::Module));
        }
    }
    let (impl_generics, type_generics, clause) = generics.split_for_impl();
    let name = &input.ident;
    Ok(quote! {
        #[automatically_derived]
        impl #impl_generics #nn::Module for #name #type_generics #clause {
            fn visit(&self, path: &str, f: &mut dyn ::core::ops::FnMut(&str, #nn::ModuleEntry<'_>)) {
                let _ = (path, &f);
                match self { #visits }
            }

            fn module_path(&self) -> #nn::ModulePath {
                match self { #paths }
                #nn::ModulePath::ROOT
            }
        }
    })
}

/// Enters the module for the duration of the method, by a call of `nn::enter_module` at the start of its body. Memory
/// reports and out-of-memory errors then also attribute operations between the module's layers to the module.
///
/// ```text
/// #[nn::forward]
/// fn forward(&self, x: &Tensor) -> Result<Tensor> { .. }
/// ```
#[proc_macro_attribute]
pub fn forward(args: proc_macro::TokenStream, method: proc_macro::TokenStream) -> proc_macro::TokenStream {
    expand_forward(args.into(), method.into()).unwrap_or_else(Error::into_compile_error).into()
}

fn expand_forward(args: TokenStream, method: TokenStream) -> Result<TokenStream> {
    let mut root = quote!(::forebay);
    if !args.is_empty() {
        let named = |input: syn::parse::ParseStream<'_>| {
            input.parse::<Token![crate]>()?;
            input.parse::<Token![=]>()?;
            Path::parse_mod_style(input)
        };
        root = syn::parse::Parser::parse2(named, args)?.to_token_stream();
    }
    let mut trees: Vec<TokenTree> = method.into_iter().collect();
    let body = match trees.pop() {
        Some(TokenTree::Group(body)) if body.delimiter() == Delimiter::Brace => body.stream(),
        other => {
            let span = other.map_or_else(Span::call_site, |tree| tree.span());
            return Err(Error::new(span, "`forward` goes on a method with a body"));
        }
    };
    let takes_self = |tree: &TokenTree| match tree {
        TokenTree::Group(group) if group.delimiter() == Delimiter::Parenthesis => {
            group.stream().into_iter().any(|tree| matches!(tree, TokenTree::Ident(name) if name == "self"))
        }
        _ => false,
    };
    if !trees.iter().any(takes_self) {
        return Err(Error::new(Span::call_site(), "`forward` goes on a method of a module, with `&self`"));
    }
    let head: TokenStream = trees.into_iter().collect();
    Ok(quote!(#head { let _scope = #root::nn::enter_module(self); #body }))
}

/// Returns the path of the crate that contains `nn`.
fn crate_root(attrs: &[Attribute]) -> Result<TokenStream> {
    let mut root = quote!(::forebay);
    for attr in attrs.iter().filter(|a| a.path().is_ident("module")) {
        attr.parse_nested_meta(|meta| {
            if !meta.path.is_ident("crate") {
                return Err(meta.error("expected `crate = path`; `skip` goes on a field"));
            }
            meta.input.parse::<Token![=]>()?;
            root = Path::parse_mod_style(meta.input)?.to_token_stream();
            Ok(())
        })?;
    }
    Ok(root)
}

/// A field that is not skipped: its number, and its name in paths.
struct VisitedField<'a> {
    index: usize,
    field: &'a Field,
    name: String,
}

fn visited_fields(fields: &Fields) -> Result<Vec<VisitedField<'_>>> {
    let mut kept = Vec::new();
    for (k, field) in fields.iter().enumerate() {
        let mut skip = false;
        let mut name = field.ident.as_ref().map_or_else(|| k.to_string(), strip_raw_prefix);
        for attr in field.attrs.iter().filter(|a| a.path().is_ident("module")) {
            attr.parse_nested_meta(|meta| {
                if meta.path.is_ident("skip") {
                    skip = true;
                } else if meta.path.is_ident("name") {
                    name = meta.value()?.parse::<LitStr>()?.value();
                } else {
                    return Err(meta.error("expected `skip` or `name = \"..\"`"));
                }
                Ok(())
            })?;
        }
        if !skip {
            kept.push(VisitedField { index: k, field, name });
        }
    }
    Ok(kept)
}

/// Returns the name of a field in paths: `type`, where the program has to write `r#type`.
fn strip_raw_prefix(ident: &syn::Ident) -> String {
    let name = ident.to_string();
    name.strip_prefix("r#").map_or(name.clone(), str::to_owned)
}

/// Returns the arms of a struct or a variant: in the visit, and in the search for its path. The field of a wrapper adds
/// no name.
fn match_arms<'a>(
    nn: &TokenStream,
    constructor: &TokenStream,
    fields: &'a Fields,
    is_wrapper: bool,
    seen: &mut Vec<&'a syn::Type>,
) -> Result<(TokenStream, TokenStream)> {
    let (mut patterns, mut visits, mut paths) = (TokenStream::new(), TokenStream::new(), TokenStream::new());
    for VisitedField { index, field, name } in visited_fields(fields)? {
        seen.push(&field.ty);
        let member = match &field.ident {
            Some(ident) => ident.to_token_stream(),
            None => Index { index: index as u32, span: field.span() }.to_token_stream(),
        };
        let (bound, name) = (format_ident!("field_{index}"), if is_wrapper { "" } else { &name });
        patterns.extend(quote!(#member: #bound,));
        visits.extend(quote!(#nn::Module::visit(#bound, &#nn::join_path(path, #name), f);));
        paths.extend(quote! {
            let path = #nn::Module::parent_path(#bound, #name);
            if !path.is_root() {
                return path;
            }
        });
    }
    let arm = |body: TokenStream| quote!(#constructor { #patterns .. } => { #body });
    Ok((arm(visits), arm(paths)))
}
