//! `#[derive(Module)]` for forebay: makes a struct of modules, tensors and plain values a module.
//!
//! The derived `visit` calls `visit` of each field in order of declaration. A field's path is its name, or its index
//! in a tuple struct. Every field's type must implement `Module`: tensors, layers, containers and plain values
//! (integers, floats, strings, devices) do. Attributes change this:
//! - `#[module(skip)]` on a field leaves the field out, whatever its type.
//! - `#[module(name = "self")]` on a field sets its name, to match the names in weight files. With an empty name,
//!   entries of the field appear directly under the module's own path, as for a wrapper of one layer.
//! - `#[module(debug)]` on the type implements `Debug`, which prints the tree of `Module::summary`.
//! - `#[module(extra_repr)]` on the type calls its method `extra_repr(&self) -> String` for the options in this tree.
//!   By default they are the plain values.
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
    let TypeAttributes { root, has_debug, has_extra_repr } = TypeAttributes::parse(&input.attrs)?;
    let nn = quote!(#root::nn);
    let name = &input.ident;
    let mut fields = Vec::new();
    let (mut children, mut warnings) = (TokenStream::new(), TokenStream::new());
    // Arms of variants that are described as the module that they wrap, and patterns of all others.
    let (mut wrappers, mut others) = (TokenStream::new(), Vec::new());
    match &input.data {
        Data::Struct(data) => {
            let visited = visited_fields(&data.fields)?;
            warnings.extend(warn_of_dropout(&visited));
            children.extend(child_arm(&quote!(Self), &visited, false));
            others.push(quote!(Self { .. }));
            fields.extend(visited);
        }
        Data::Enum(data) => {
            for Variant { ident, fields: of, .. } in &data.variants {
                let visited = visited_fields(of)?;
                let is_wrapper = of.len() == 1 && matches!(of, Fields::Unnamed(_));
                children.extend(child_arm(&quote!(Self::#ident), &visited, is_wrapper));
                if is_wrapper && !visited.is_empty() {
                    wrappers
                        .extend(quote!(Self::#ident(field) => #nn::Module::describe(field, name, parent),));
                } else {
                    others.push(quote!(Self::#ident { .. }));
                }
                fields.extend(visited);
            }
        }
        Data::Union(data) => {
            return Err(Error::new(data.union_token.span, "a union cannot be a module; use a struct"));
        }
    }
    let mut generics = input.generics.clone();
    if generics.type_params().next().is_some() {
        // The bound is on the fields' types, not on the type parameters: skipped fields may use other types.
        let clause = generics.make_where_clause();
        for VisitedField { field: Field { ty, .. }, .. } in &fields {
            clause.predicates.push(syn::parse_quote!(#ty: #nn::Module));
        }
    }
    let (impl_generics, type_generics, clause) = generics.split_for_impl();
    let options = has_extra_repr.then(|| quote!(own.set_options(self.extra_repr());));
    let describe_own = (!others.is_empty()).then(|| {
        quote! {
            #(#others)|* => {
                let mut own = #nn::ModuleSummary::new(stringify!(#name));
                #nn::Module::for_each_child(self, &mut |name, child| child.describe(name, &mut own));
                #options
                parent.add_child(name, own);
            }
        }
    });
    let debug = has_debug.then(|| {
        quote! {
            #[automatically_derived]
            impl #impl_generics ::core::fmt::Debug for #name #type_generics #clause {
                fn fmt(&self, f: &mut ::core::fmt::Formatter<'_>) -> ::core::fmt::Result {
                    ::core::fmt::Debug::fmt(&#nn::Module::summary(self), f)
                }
            }
        }
    });
    Ok(quote! {
        #[automatically_derived]
        impl #impl_generics #nn::Module for #name #type_generics #clause {
            fn visit(&self, path: &str, f: &mut dyn ::core::ops::FnMut(&str, #nn::ModuleEntry<'_>)) {
                #nn::Module::for_each_child(self, &mut |name, child| child.visit(&#nn::join_path(path, name), f));
            }

            fn for_each_child(&self, each: &mut dyn ::core::ops::FnMut(&str, &dyn #nn::Module)) {
                let _ = &each;
                match self { #children }
            }

            fn describe(&self, name: &str, parent: &mut #nn::ModuleSummary) {
                match self { #wrappers #describe_own }
            }
        }
        #debug
        #warnings
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

/// Attributes of a type.
struct TypeAttributes {
    /// Path of the crate that contains `nn`.
    root: TokenStream,
    /// If true, the derive implements `Debug` too.
    has_debug: bool,
    /// If true, the type's method `extra_repr` describes its options.
    has_extra_repr: bool,
}

impl TypeAttributes {
    fn parse(attrs: &[Attribute]) -> Result<Self> {
        let mut parsed = Self { root: quote!(::forebay), has_debug: false, has_extra_repr: false };
        for attr in attrs.iter().filter(|a| a.path().is_ident("module")) {
            attr.parse_nested_meta(|meta| {
                if meta.path.is_ident("debug") {
                    parsed.has_debug = true;
                } else if meta.path.is_ident("extra_repr") {
                    parsed.has_extra_repr = true;
                } else if meta.path.is_ident("crate") {
                    meta.input.parse::<Token![=]>()?;
                    parsed.root = Path::parse_mod_style(meta.input)?.to_token_stream();
                } else {
                    return Err(meta
                        .error("expected `debug`, `extra_repr` or `crate = path`; `skip` goes on a field"));
                }
                Ok(())
            })?;
        }
        Ok(parsed)
    }
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

/// Returns the arm of a struct or a variant that calls `each` with its fields. The field of a wrapper adds no name.
fn child_arm(constructor: &TokenStream, fields: &[VisitedField<'_>], is_wrapper: bool) -> TokenStream {
    let (mut patterns, mut calls) = (TokenStream::new(), TokenStream::new());
    for VisitedField { index, field, name } in fields {
        let member = match &field.ident {
            Some(ident) => ident.to_token_stream(),
            None => Index { index: *index as u32, span: field.span() }.to_token_stream(),
        };
        // An error about a type that is no module points at the type of the field.
        let at_type = field.ty.span().resolved_at(Span::call_site());
        let bound = format_ident!("field_{index}", span = at_type);
        patterns.extend(quote!(#member: #bound,));
        let name = if is_wrapper { "" } else { name };
        calls.extend(quote!(each(#name, #bound);));
    }
    quote!(#constructor { #patterns .. } => { #calls })
}

/// Returns a warning for each probability of dropout in a module that has no training mode.
fn warn_of_dropout(fields: &[VisitedField<'_>]) -> TokenStream {
    let type_name = |field: &Field| match &field.ty {
        syn::Type::Path(ty) => {
            ty.path.segments.last().map(|segment| segment.ident.to_string()).unwrap_or_default()
        }
        _ => String::new(),
    };
    let mut warnings = TokenStream::new();
    if fields.iter().any(|f| ["TrainingMode", "AtomicBool"].contains(&type_name(f.field).as_str())) {
        return warnings;
    }
    for VisitedField { field, name, .. } in fields {
        let Some(ident) = field.ident.as_ref().filter(|_| name.contains("drop")) else { continue };
        if !["f32", "f64"].contains(&type_name(field).as_str()) {
            continue;
        }
        let note = format!(
            "`{name}` is a probability, and the module has no training mode, so that dropout would go on after `eval()`: add a \
             field of type `nn::TrainingMode` and use the probability only where it `is_on()`, or use the layer `nn::Dropout`; \
             `#[module(skip)]` on the field ends this warning"
        );
        // A procedural macro can only warn by using something deprecated.
        let field_name = strip_raw_prefix(ident).to_uppercase();
        let warning = format_ident!("{field_name}_WITHOUT_TRAINING_MODE", span = ident.span());
        warnings.extend(quote! {
            const _: () = {
                #[deprecated(note = #note)]
                const #warning: () = ();
                #warning
            };
        });
    }
    warnings
}
