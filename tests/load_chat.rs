//! Chat templates: rendered as Hugging Face does, and unable to do anything else (HC-106).

use serde_json::{Value, json};
use slipstream_engine::error::EngineError;
use slipstream_engine::load::{ChatTemplate, SpecialTexts};

fn template(source: &str) -> ChatTemplate {
    ChatTemplate::new(source, SpecialTexts { bos: Some("<s>".to_owned()), eos: Some("</s>".to_owned()) })
}

fn hello() -> Value {
    json!([{ "role": "system", "content": "Be <brief>." }, { "role": "user", "content": "Hi" }])
}

fn rendered(source: &str) -> Result<String, EngineError> {
    template(source).render(&hello(), true)
}

#[test]
fn templates_render_as_in_hugging_face() {
    let chatml = "{%- for message in messages %}\n    {{- '<|im_start|>' + message['role'] + '\\n' + message.content + '<|im_end|>\\n' }}\n{%- endfor %}\n{%- if add_generation_prompt %}\n    {{- '<|im_start|>assistant\\n' }}\n{%- endif %}\n";
    let expected = "<|im_start|>system\nBe <brief>.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n";
    assert_eq!(rendered(chatml).expect("a prompt"), expected);
    let cases = [
        ("{% if true %}\nx\n  {% endif %}\ny\n", "x\ny"),
        ("{{ bos_token }}{{ eos_token }}{{ missing }}", "<s></s>"),
        ("{{ messages[0] | tojson }}", "{\"role\": \"system\", \"content\": \"Be <brief>.\"}"),
        ("{{ ['é', 1, none, true] | tojson }}", "[\"é\", 1, null, true]"),
        ("{{ {'b': 1, 'a': [2]} | tojson(indent=2) }}", "{\n  \"b\": 1,\n  \"a\": [\n    2\n  ]\n}"),
        ("{{ messages[1:] | length }}{{ messages[-1]['content'].strip().upper() }}", "1HI"),
        ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "2"),
        ("{{ 'a</think>b'.split('</think>')[-1].lstrip('\\n') }}", "b"),
        ("{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.role }}{% endfor %}", "user"),
        ("{% if tools is none and documents is not defined or true %}{{ strftime_now('%Y')|length }}{% endif %}", "4"),
        ("a{% generation %}b{%- endgeneration -%} c", "abc"),
        ("{% for k, v in messages[1].items() %}{{ k }}={{ v }};{% endfor %}", "role=user;content=Hi;"),
    ];
    for (source, expected) in cases {
        assert_eq!(rendered(source).expect(source), expected, "{source}");
    }
    let parts =
        json!([{ "role": "user", "content": [{ "type": "text", "text": "a" }, { "type": "text", "text": "b" }] }]);
    assert_eq!(template("{{ messages[0].content }}").render(&parts, false).expect("a prompt"), "ab");
}

#[test]
fn messages_and_templates_that_do_not_fit_are_errors() {
    let plain = template("{{ messages[0].content }}");
    let cases = [
        (json!([]), "at least one message"),
        (json!("hi"), "a list of messages"),
        (json!([1]), "message 0: expected an object"),
        (json!([{ "content": "x" }]), "message 0: expected a role"),
        (json!([{ "role": "user" }]), "message 0: expected a text as content"),
        (json!([{ "role": "user", "content": [{ "type": "image_url" }] }]), "parts of type text"),
    ];
    for (messages, expected) in cases {
        let error = plain.render(&messages, true).expect_err(expected);
        assert!(matches!(error, EngineError::Request(_)), "{error:?}");
        assert!(error.to_string().contains(expected), "{error}");
    }
    let error = rendered("{{ raise_exception('roles must alternate') }}").expect_err("an exception").to_string();
    assert!(error.contains("roles must alternate"), "{error}");
    let error = rendered("{% if %}").expect_err("a syntax error");
    assert!(matches!(error, EngineError::Model(_)), "{error:?}");
    assert!(error.to_string().contains("chat template"), "{error}");
}

#[test]
fn hc_106_code_in_a_chat_template_does_not_run() {
    let payloads = [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__.__base__.__subclasses__()[132].__init__.__globals__['popen']('id').read() }}",
        "{{ self.__init__.__globals__.__builtins__.__import__('os').popen('id').read() }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ lipsum.__globals__['os'].popen('id').read() }}",
        "{{ namespace.__init__.__globals__ }}{{ raise_exception.__globals__['x'] }}",
        "{% include '/etc/passwd' %}",
        "{% include '../../../../etc/passwd' %}",
        "{% import 'os' as os %}{{ os.system('id') }}",
        "{% from 'os' import popen %}{{ popen('id') }}",
        "{% extends '/etc/passwd' %}",
        "{{ open('/etc/passwd').read() }}",
        "{{ __import__('os').system('id') }}",
        "{{ eval('1+1') }}{{ exec('x') }}",
        "{{ get_template('/etc/passwd') }}",
    ];
    for payload in payloads {
        match rendered(payload) {
            Err(error) => assert!(matches!(error, EngineError::Request(_) | EngineError::Model(_)), "{error:?}"),
            Ok(text) => assert!(!text.contains("uid=") && !text.contains("root:"), "{payload}: {text}"),
        }
    }
    assert_eq!(rendered("{{ messages.__class__ }}{{ ''.__dict__ }}").expect("nothing"), "");
}

#[test]
fn hc_106_templates_that_never_end_or_grow_are_stopped() {
    let long = "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}";
    let payloads = [
        long,
        "{% set ns = namespace(t='xxxxxxxxxxxxxxxx') %}{% for i in range(64) %}{% set ns.t = ns.t ~ ns.t %}{% endfor %}{{ ns.t|length }}",
        "{% set ns = namespace(t='xxxxxxxxxxxxxxxx') %}{% for i in range(64) %}{% set ns.t = ns.t + ns.t %}{% endfor %}{{ ns.t|length }}",
        "{{ ('x' * 90000000) ~ ('x' * 90000000) }}",
        "{{ range(999999999999) | list | length }}",
        "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
        "{% include 'chat' %}",
        "{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}",
        "{{ '%999999999d' | format(1) }}",
        "{% for i in range(100000) %}{{ 'xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx' * 1000 }}{% endfor %}",
    ];
    for payload in payloads {
        let started = std::time::Instant::now();
        assert!(rendered(payload).is_err(), "{payload}");
        assert!(started.elapsed().as_secs() < 10, "{payload}");
    }
    let deep = format!("{}{}", "{% if true %}".repeat(5000), "{% endif %}".repeat(5000));
    assert!(rendered(&deep).is_err());
    assert!(rendered(&format!("{{{{ {}1{} }}}}", "(".repeat(5000), ")".repeat(5000))).is_err());
    assert!(rendered(&"x".repeat(2 << 20)).is_err());
}
